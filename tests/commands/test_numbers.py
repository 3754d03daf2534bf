import json

import pytest

from lsq.commands import numbers, train_text


@pytest.fixture
def one_process(monkeypatch):
    """Train one after the other in this process."""

    def train(trainings, *, threads, quiet):
        assert threads >= 1 and quiet
        for training in trainings:
            command, *arguments = training.arguments
            assert command == "train-text" and train_text.run(arguments) == 0
        return {training.name: json.loads((training.folder / "results.json").read_text()) for training in trainings}

    monkeypatch.setattr(numbers, "train_side_by_side", train)


def test_whole_task(tmp_path, capsys, one_process):
    arguments = ["--output", str(tmp_path), "--updates", "3", "--train-pairs", "300", "--test-pairs", "12", "--quiet"]
    assert numbers.run(arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["runs"].keys() == {"float", "int8"}
    for run in results["runs"].values():
        assert 0 <= run["exact_match"] <= 100 and "tok:char" in run["bleu_signature"]
        assert run["updates"] == 3
    assert results["runs"]["float"]["options"]["--arch"] == "transformer"
    assert results["runs"]["int8"]["options"]["--lsq-mode"] == "int8"
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    samples = (tmp_path / "samples.txt").read_text()
    printed = capsys.readouterr().out
    assert samples.strip() in printed
    assert samples.count("English") == numbers.SAMPLES and "exact match" in printed
    for run in results["runs"].values():
        assert f"update {run['best_update']} " in printed

    assert numbers.run(arguments) == 0
    assert "numbers: already done" in capsys.readouterr().out
    assert numbers.run(["--updates", "4", *arguments[4:], *arguments[:2]]) == 0  # goes on
    assert {run["updates"] for run in json.loads((tmp_path / "results.json").read_text())["runs"].values()} == {4}
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"a comparison with other options \(--test-pairs: 12 before, 13 now\)"):
        numbers.run([*arguments, "--test-pairs", "13"])
    assert capsys.readouterr().out == ""


def test_files_of_somebody_else_stay(tmp_path):
    (tmp_path / "samples.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds samples.txt, which this command did not make"):
        numbers.run(["--output", str(tmp_path), "--updates", "3", "--train-pairs", "300", "--test-pairs", "12"])
    assert [path.name for path in tmp_path.iterdir()] == ["samples.txt"]
