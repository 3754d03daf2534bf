"""`lsq compare`: paired trainings, and what their differences say."""

import json
import re

import pytest

from lsq.commands import compare, train_text
from lsq.commands.losses import LOSSES, read_losses
from tests.commands.conftest import begun, text_options, write_pairs


@pytest.fixture
def one_process(monkeypatch):
    """Train in this process; the command lines of the trainings."""
    trained = []

    def run_lsq(arguments, *, threads):
        trained.append(arguments[1:])
        assert arguments[0] == "train-text" and train_text.run(arguments[1:]) == 0

    monkeypatch.setattr(compare, "run_lsq", run_lsq)
    return trained


@pytest.fixture
def text(tmp_path) -> list[str]:
    files = {"train": write_pairs(tmp_path, "train", 120, 1)}
    return [*text_options(files, tmp_path / "out"), "--updates", "9"]


@pytest.mark.thorough
def test_a_comparison(text, tmp_path, capsys, one_process):
    arguments = [*text, "--updates", "6", "--cpu", "--seeds", "1", "2"]
    assert compare.run(arguments) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "out" / "comparison"
    found = json.loads((folder / "differences.json").read_text())
    assert found["seeds"] == [1, 2]
    assert (folder / "differences.png").read_bytes().startswith(b"\x89PNG")
    ends = {
        name: read_losses(tmp_path / "out" / f"{name}-2" / "model" / LOSSES).training[6]
        for name in ("float", "float-again", "int8")
    }
    for name in ("float-again", "int8"):
        apart = ends[name] - ends["float"]
        assert found["differences"]["updates 6 to 6"][name][1] == pytest.approx(apart)
    first = found["differences"]["updates 1 to 1"]  # the same weights, batches and dropout masks
    assert first["float-again"] == [0.0, 0.0] and 0 < max(map(abs, first["int8"])) < 0.01
    assert "| updates 1 to 1" in printed
    assert "by 2 seeds" in printed

    one_process.clear()
    assert compare.run([*arguments[:-2], "1"]) == 0
    assert "trained twice differs by up to" in capsys.readouterr().out and len(one_process) == 3


def test_what_is_trained(text, monkeypatch):
    trained = []
    monkeypatch.setattr(compare, "run_lsq", lambda words, threads: trained.append(words))
    monkeypatch.setattr(compare, "report", lambda *given: None)
    further = ["--side", "old=--mode int8 --lsq-clips learned", "--updates", "400", "--lr", "0.002"]
    after = ["--", "--encoder-normalize-before"]
    assert compare.run([*text, *further, "--seeds", "3", "3", *after]) == 0
    names = [words[words.index("--name") + 1] for words in trained]
    assert names == ["float-3", "float-again-3", "old-3"]
    for words in trained:
        assert words[0] == "train-text" and words[-2:] == after
        assert words[words.index("--seed") + 1] == "3"
    parsed = [train_text.parsed(words[1:])[1].given for words in trained]
    assert [given.mode for given in parsed] == ["float", "float", "int8"]
    assert parsed[0].arch == "lsq_transformer"
    assert parsed[0].lr == 0.002 and 0 < parsed[1].lr - 0.002 < 1e-9
    assert parsed[2].lsq_clips == "learned"


def test_what_does_not_fit_earlier_trainings_is_refused_before_any(text, monkeypatch):
    """With advice that this command takes: it has no --name."""
    monkeypatch.setattr(compare, "run_lsq", lambda words, threads: begun(words[1:], 40))
    monkeypatch.setattr(compare, "report", lambda *given: None)
    assert compare.run([*text, "--updates", "40"]) == 0
    monkeypatch.setattr(compare, "run_lsq", None)
    advice = "choose another --output, or delete the trainings that are there with --overwrite$"
    message = f"is 30, but .*float-1 has made 40 .*; give at least 40, or {advice}"
    with pytest.raises(ValueError, match=message):
        compare.run([*text, "--updates", "30", "--log-every", "4"])
    message = rf"float-1 holds a run with other options \(.*--lr.*\); {advice}"
    with pytest.raises(ValueError, match=message):
        compare.run([*text, "--updates", "40", "--lr", "0.1"])


@pytest.mark.parametrize(
    "given, message",
    [
        (["--mode", "int8"], "--mode is set by lsq compare itself"),
        (["--seed=3"], "--seed is set by lsq compare itself"),
        (["--side", "int8"], "--side 'int8' must be NAME=OPTIONS"),
        (["--side", "float=--lsq-bits 4"], "with a new name"),
        (["--side", "a=--mode int8", "--side", "a=--mode int8"], "with a new name"),
        (["--side", "a=--mode int8 --seed=4"], "a: --seed is no difference between sides; leave"),
        (["--side", "a=--mode 'int8"], "--side a: No closing quotation"),
        (["--", "--lr", "0.1"], "--lr after -- would be the same for all trainings"),
        (["--arch", "transformer"], "--arch transformer has no quantisers"),
    ],
)
def test_mistakes(text, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        compare.run([*text, *given])
    assert not (tmp_path / "out").exists()


def test_values_that_are_none(text, lsq, refused, monkeypatch, tmp_path):
    status, _, said = lsq("compare", *text, "--side", "a=--mode int9")
    assert status == 2 and "lsq train-text: error: argument --mode: invalid choice: 'int9'" in said
    for seed in ("-1", "4294967296", "1.5"):
        message = f"{seed!r} is no seed; it must be a number from 0 to 4294967295"
        refused(message, "compare", *text, f"--seeds={seed}")

    def run_lsq(words, *, threads):
        raise ChildProcessError("lsq train-text ended with status 1")

    monkeypatch.setattr(compare, "run_lsq", run_lsq)
    with pytest.raises(ChildProcessError):
        compare.run(text)
    assert not (tmp_path / "out").exists()


CHANCE = "\\+0.0100 bits a token from float. Float trained twice differs by up to 0.0200; this may"


@pytest.mark.parametrize(
    "values, verdict",
    [
        ([0.01, -0.01, 0.011, -0.009], "cannot be told from float by 4 seeds: \\+0.0005"),
        ([0.010, 0.011, 0.012, 0.011], "is worse than float by 4 seeds: \\+0.0110"),
        ([-0.010, -0.011, -0.012, -0.011], "is better than float"),
        # t of one degree of freedom asks for more
        ([0.010, 0.012], "cannot be told from float by 2 seeds"),
        ([0.01], CHANCE),
        ([0.03], "up to 0.0200; several --seeds tell"),
    ],
)
def test_verdicts(values, verdict):
    assert compare.spread([0.25], 4) == "+0.2500"
    assert compare.spread([1.0, 2.0, 3.0], 2) == "+2.00 ± 0.58"  # the standard deviation is 1
    ended = {"int8": values, compare.AGAIN: [0.001] * len(values)}
    windows = {"updates 1 to 2": {compare.AGAIN: [-0.02]}, "updates 3 to 4": {compare.AGAIN: [0.0]}}
    assert re.search(verdict, compare.verdict("int8", ended, windows, 2))
