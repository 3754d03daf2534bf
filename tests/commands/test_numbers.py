import json

import pytest

from lsq.commands import numbers, train_text
from tests.commands.conftest import begun

SIZES = ["--hidden", "32", "--feed-forward", "64", "--layers", "1", "--max-tokens", "400"]
SMALL = ["--updates", "3", "--train-pairs", "300", "--test-pairs", "12", *SIZES]


@pytest.fixture
def one_process(monkeypatch):

    def run_lsq(arguments, *, threads):
        assert threads >= 1
        assert arguments[0] == "train-text" and train_text.run(arguments[1:]) == 0

    monkeypatch.setattr(numbers, "run_lsq", run_lsq)


@pytest.mark.thorough
def test_whole_task(tmp_path, capsys, one_process):
    arguments = ["--output", str(tmp_path), *SMALL, "--quiet"]
    assert numbers.run(arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["runs"].keys() == {"float", "int8"}
    for run in results["runs"].values():
        assert 0 <= run["exact_match"] <= 100 and "tok:char" in run["bleu_signature"]
        assert run["updates"] == 3 and run["seconds_an_update"] > 0
        assert run["kept_bytes"] < run["peak_bytes"]
    assert results["runs"]["int8"]["kept_bytes"] < 0.6 * results["runs"]["float"]["kept_bytes"]
    for mode, run in results["runs"].items():
        assert run["options"]["--arch"] == "lsq_transformer"
        assert run["options"]["--lsq-mode"] == mode
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    samples = (tmp_path / "samples.txt").read_text()
    printed = capsys.readouterr().out
    assert samples.strip() in printed
    ends = [results["runs"][mode]["best_validation_loss"] for mode in ("int8", "float")]
    assert f"int8 ends {ends[0] - ends[1]:+.4f} bits a token from float" in printed
    assert samples.count("English") == numbers.SAMPLES and "times as fast" in printed
    for run in results["runs"].values():
        assert f"{run['exact_match']:.1f} %" in printed
        assert f"{1e-6 * run['peak_bytes']:.0f}" in printed

    assert numbers.run(arguments) == 0
    assert "numbers: already done" in capsys.readouterr().out
    assert numbers.run([*arguments, "--updates", "4"]) == 0  # goes on
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert {run["updates"] for run in runs.values()} == {4}
    capsys.readouterr()
    differences = r"\(--hidden: 32 before, 64 now; --test-pairs: 12 before, 13 now\)"
    differences = f"a comparison with other options {differences}"
    with pytest.raises(ValueError, match=differences):
        numbers.run([*arguments, "--test-pairs", "13", "--hidden", "64"])
    assert capsys.readouterr().out == ""


def test_what_is_there_is_refused_with_advice_that_works(tmp_path, monkeypatch):
    """This command has neither --name nor --overwrite."""
    monkeypatch.setattr(numbers, "run_lsq", lambda words, threads: begun(words[1:], 3))
    monkeypatch.setattr(numbers, "report", lambda *given: None)
    assert numbers.run(["--output", str(tmp_path), *SMALL]) == 0
    monkeypatch.setattr(numbers, "run_lsq", None)
    message = r"has made 3 already; give at least 3, or choose another --output$"
    with pytest.raises(ValueError, match=message):
        numbers.run(["--output", str(tmp_path), *SMALL, "--updates", "2"])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "samples.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds samples.txt, which this command did not make"):
        numbers.run(["--output", str(theirs), *SMALL])
    assert [path.name for path in theirs.iterdir()] == ["samples.txt"]


@pytest.mark.parametrize(
    "arguments, of_fairseq, of_ours",
    [
        (["--lsq-device", "emulator"], ["--cpu"], ["--lsq-device", "emulator", "--cpu"]),
        (["--lsq-device", "cpu"], ["--cpu"], ["--lsq-device", "cpu", "--cpu"]),
        (["--cpu"], ["--cpu"], ["--cpu"]),
        ([], [], []),
    ],
)
def test_all_trainings_compute_in_one_place(monkeypatch, tmp_path, arguments, of_fairseq, of_ours):
    given = []
    monkeypatch.setattr(numbers, "compare", given.append)
    assert numbers.run(["--output", str(tmp_path), "--quiet", *arguments]) == 0
    for name, expected in (("float", of_ours), ("int8", of_ours), ("fairseq", of_fairseq)):
        made = numbers.train_text_arguments(given[0], {}, name)
        assert made[-len(expected) - 1 :] == [*expected, "--quiet"]
        for option in ("--cpu", "--lsq-device"):
            assert made.count(option) == expected.count(option)


def test_int8_is_compared_with_the_faster_float():
    run = {"exact_match": 90.0, "bleu": 99.0, "chrf": 98.0, "best_validation_loss": 0.12}
    run |= {"best_update": 200, "peak_bytes": 1e8, "kept_bytes": 9e7}
    seconds = {"float": 0.4, "int8": 0.2, "fairseq": 0.3}
    runs = {name: run | {"seconds_an_update": each} for name, each in seconds.items()}
    shown = numbers.table(runs)
    assert "0.400     0.200     0.300   int8 is 1.50 times as fast as fairseq" in shown
    assert "fairseq" in shown.splitlines()[0]
