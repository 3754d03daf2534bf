import json
import random

import pytest

from lsq.commands import numbers, train_text
from lsq.commands.numbers import name_numbers, sample_numbers


def test_samples_are_different_and_avoid_the_excluded():
    excluded = set(range(0, 1_000_000, 2))
    found = sample_numbers(2000, random.Random(1), excluded)
    assert len(set(found)) == 2000
    assert not set(found) & excluded
    lengths = {len(str(number)) for number in found}
    assert lengths == {1, 2, 3, 4, 5, 6}


def test_too_many_numbers():
    with pytest.raises(ValueError, match="600000 numbers are wanted, but at most 500000"):
        sample_numbers(600_000, random.Random(1))


def test_names():
    names = name_numbers([21, 345], "naming")
    assert names.source == ["twenty-one", "three hundred and forty-five"]
    assert names.target == ["einundzwanzig", "dreihundertfünfundvierzig"]


def test_splits_do_not_overlap(tmp_path):
    numbers.write_numbers(tmp_path, train_pairs=3000, test_pairs=50, seed=1)
    lines = {split: (tmp_path / f"{split}.src").read_text().splitlines() for split in ("train", "valid", "test")}
    assert [len(lines[split]) for split in lines] == [3000, numbers.VALID_PAIRS, 50]
    assert len(set().union(*lines.values())) == 3000 + numbers.VALID_PAIRS + 50


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
