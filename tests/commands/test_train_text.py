"""`lsq train-text`: from text to scores, resumed trainings, and what is refused unwritten."""

import json
import os
import random
import signal
from pathlib import Path

import fairseq_cli.train as fairseq_train
import pytest
import torch
from fairseq.trainer import Trainer

from lsq.commands import compare, text_run, train_text
from lsq.commands.interruption import Interrupted, name_of
from lsq.commands.losses import read_losses
from lsq.commands.train_text import parser
from lsq.files.lock import Busy, locked_folder
from tests.commands.conftest import files_in, results_of

SMOOTHED = "label_smoothed_cross_entropy"


@pytest.mark.parametrize(
    ("options", "name", "criterion"),
    [
        pytest.param("--mode float", "float", SMOOTHED, marks=pytest.mark.thorough),
        ("--mode int8 --lsq-backward int8", "int8", f"lsq_{SMOOTHED}"),
        ("--mode float --arch lsq_transformer --name other", "other", f"lsq_{SMOOTHED}"),
    ],
)
def test_from_text_to_scores(command, tmp_path, capsys, options, name, criterion):
    values = text_run.set_by(parser().parse_args(command("--layers", "2")))
    assert values["--encoder-layers"] == values["--decoder-layers"] == "2"
    arguments = command("--updates", "3", *options.split(), "--", "--encoder-normalize-before")
    assert train_text.run(arguments) == 0
    folder = tmp_path / "out" / name
    results = results_of(folder)
    assert results["updates"] == 3 and results["test_pairs"] == 9
    assert 0 <= results["bleu"] <= 100 and "version" in results["bleu_signature"]
    assert results["options"]["--criterion"] == criterion
    assert results["options"]["more"] == ["--encoder-normalize-before"]
    assert len((folder / "translation" / "hypotheses.txt").read_text().splitlines()) == 9
    assert (folder / "losses.png").exists() and (folder / "model" / "checkpoint_best.pt").exists()
    printed = capsys.readouterr()
    assert "BLEU" in printed.out and "nrefs:1" in printed.out

    assert train_text.run(arguments) == 0
    again = capsys.readouterr().out
    assert f"{name}: already trained" in again and "translation: already done" in again
    assert results_of(folder) == results


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(n, arguments): run until n updates are made."""

    def stop_at(updates: int, arguments: list[str]) -> None:
        step = Trainer.train_step

        def stop(trainer, samples, raise_oom=False):
            if trainer.get_num_updates() == updates:
                raise Interrupted(15, "stopped")
            return step(trainer, samples, raise_oom)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", stop)
            with pytest.raises(Interrupted):
                train_text.run(arguments)

    return stop_at


@pytest.mark.thorough
def test_interrupted_run_continues_and_the_time_of_all_sittings_counts(command, tmp_path, stop_at):
    arguments = command("--updates", "4", "--mode", "float")
    folder = tmp_path / "out" / "float"
    losses = folder / "model" / "losses.jsonl"
    stop_at(2, arguments)
    assert not (folder / "results.json").exists()
    lines = [json.loads(line) for line in losses.read_text().splitlines()]
    later = [json.dumps(line | {"seconds": line["seconds"] + 1000}) + "\n" for line in lines]
    losses.write_text("".join(later))
    assert train_text.run(arguments) == 0
    assert results_of(folder)["updates"] == 4
    assert "(epoch 1 @ 2 updates)" in (folder / "model" / "train.log").read_text()
    seconds = [json.loads(line)["seconds"] for line in losses.read_text().splitlines()]
    assert 1000 < seconds[-1] < 1100 and seconds == sorted(seconds)
    assert seconds[-1] > seconds[len(lines) - 1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("updates", "mode", "place", "sent"),
    [
        (4, "float", "validation", signal.SIGINT),
        (4, "int8", "update", signal.SIGTERM),
        (5, "float", "validation", signal.SIGINT),
    ],
)
def test_interrupted_trainings_go_on_bit_by_bit(
    command, tmp_path, monkeypatch, updates, mode, place, sent
):
    """Validations are made up for, and no update is made beyond --updates."""
    arguments, handler = command("--updates", str(updates), "--mode", mode), signal.getsignal(sent)
    train_text.run([*arguments, "--name", "whole"])
    last, step, validate = updates // 2 * 2, Trainer.train_step, fairseq_train.validate

    def signal_at(wanted: str, made: int) -> None:
        if wanted == place and made == (last if wanted == "validation" else last - 1):
            os.kill(os.getpid(), sent)

    def train_step(trainer, samples, raise_oom=False):
        signal_at("update", trainer.get_num_updates())
        return step(trainer, samples, raise_oom)

    def interrupted(cfg, trainer, *others):
        signal_at("validation", trainer.get_num_updates())
        return validate(cfg, trainer, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(fairseq_train, "validate", interrupted)
        with pytest.raises(Interrupted) as stopped:
            train_text.run([*arguments, "--name", "parts"])
        said = stopped.value.message
        assert f"stopped by {name_of(sent)} after {last} updates; wrote " in said
        assert said.endswith("the same command goes on from there")
        assert stopped.value.code == 128 + sent and signal.getsignal(sent) == handler
    train_text.run([*arguments, "--name", "parts"])
    whole, parts = folders = [tmp_path / "out" / name for name in ("whole", "parts")]
    for name in ("updates", "best_update", "best_validation_loss", "bleu", "chrf"):
        assert results_of(parts)[name] == results_of(whole)[name], name
    curves = [read_losses(folder / "model" / "losses.jsonl").validation for folder in folders]
    assert curves[0] == curves[1]
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        one, other = (torch.load(folder / "model" / name) for folder in folders)
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        for key in ("best", "train_iterator"):
            assert one["extra_state"][key] == other["extra_state"][key]


@pytest.mark.thorough
def test_a_training_that_ends_by_time_goes_on_and_damage_is_named(command, tmp_path):
    arguments, folder = command("--updates", "10", "--mode", "float"), tmp_path / "out" / "float"
    train_text.run([*arguments, "--updates", "40", "--", "--stop-time-hours", "1e-9"])
    assert results_of(folder)["updates"] < 10
    train_text.run(arguments)
    assert results_of(folder)["updates"] == 10
    best = folder / "model" / "checkpoint_best.pt"
    best.write_bytes(best.read_bytes()[:3000])
    with pytest.raises(ValueError, match=f"{best} is damaged .*checkpoint_last.pt: give that one"):
        train_text.run(arguments)
    best.unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint {best}; the newest sound"):
        train_text.run(arguments)


@pytest.mark.thorough
def test_more_updates_go_on_from_a_finished_run(command, tmp_path, capsys):
    arguments = [word for word in command("--mode", "int8") if word != "--quiet"]
    train_text.run([*arguments, "--updates", "2"])
    printed = capsys.readouterr().out  # without a terminal
    assert "int8: training; the log is " in printed
    assert "update 2 of 2: validation loss " in printed
    more = "--updates 5 --beam 1 --log-every 2 --validate-every 3".split()
    train_text.run([*arguments, *more])
    assert "int8: going on from update 2; the log is " in capsys.readouterr().out
    folder = tmp_path / "out" / "int8"
    assert "(epoch 1 @ 2 updates)" in (folder / "model" / "train.log").read_text()
    assert results_of(folder)["updates"] == results_of(folder)["best_update"] == 5
    with pytest.raises(ValueError, match=r"--updates is 4, but .* has made 5 already"):
        train_text.run([*arguments, "--updates", "4"])

    train_text.run([*arguments, "--updates", "5", "--name", "at-once"])
    resumed, at_once = (
        torch.load(tmp_path / "out" / name / "model" / "checkpoint_last.pt")["model"]
        for name in ("int8", "at-once")
    )
    assert resumed.keys() == at_once.keys()
    assert all(torch.equal(resumed[name], at_once[name]) for name in resumed)


# What is refused


def test_wrong_options_remove_nothing_and_bind_nobody(command, tmp_path):
    train_text.run(command("--updates", "1"))
    before = files_in(tmp_path / "out")
    wrong = "--heads 3", "--lsq-bits 9", "--lr nan", "--lsq-from nowhere.pt", "-- --no-such-option"
    for options in map(str.split, wrong):
        for more in ("--overwrite", "--name=new"):
            with pytest.raises((ValueError, FileNotFoundError, SystemExit)):
                train_text.run(command("--updates", "1", more, *options))
            assert files_in(tmp_path / "out") == before, options
            assert not (tmp_path / "out" / "new").exists(), options


def test_options_that_go_together_and_unknown_ones(command, files, tmp_path, capsys):
    with pytest.raises(ValueError, match="--name"):
        train_text.run(command("--updates", "2", "--name", "../home", "--overwrite"))
    source, target = map(str, files["train"])
    given = ["--src", source, "--tgt", target, "--output", str(tmp_path), "--test-src", source]
    with pytest.raises(ValueError, match="--test-src and --test-tgt go together"):
        train_text.run(given)
    for options in ("--learning-rate 1", "--updates 1 -- --no-such-option"):
        with pytest.raises(SystemExit) as stopped:
            train_text.run(command(*options.split()))
        assert stopped.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_other_options_need_another_name_or_overwrite(command, tmp_path):
    """They are refused before anything is written."""
    given = ("--updates", "1", "--mode", "float")
    assert train_text.run(command(*given)) == 0
    before = files_in(tmp_path / "out")
    pieces, lr = ("--vocabulary-size", "70"), ("--lr", "0.01")
    changed = "--vocabulary-size: 60 before, 70 now"
    of_data = f"the data of the run float, .*{changed}"
    for options, message in (
        ((*given, *pieces), rf"holds a run with other options \({changed}\)"),
        (("--updates", "1", "--mode", "int8", *pieces), of_data),
        (("--updates", "1", "--overwrite", *pieces), of_data),
        (("--prepare-only", *pieces), of_data),
        ((*given, *lr), r"other options \(--lr: 0.001 before, 0.01 now\); choose another --name"),
    ):
        with pytest.raises(ValueError, match=message):
            train_text.run(command(*options))
        assert files_in(tmp_path / "out") == before
    assert train_text.run(command(*given, *lr, *pieces, "--overwrite")) == 0
    results = results_of(tmp_path / "out" / "float")["options"]
    assert results["--lr"] == "0.01" and results["--vocabulary-size"] == 70
    # translates again, trains no more
    assert train_text.run(command(*given, *lr, *pieces, "--beam", "1")) == 0
    log = (tmp_path / "out" / "float" / "model" / "train.log").read_text()
    assert log.count("begin training epoch 1") == 1


def test_a_second_writer_is_refused(command, tmp_path, capsys):
    message = rf"process {os.getpid()} on .* is writing into .*float; .*another --name"
    with locked_folder(tmp_path / "out" / "float", "x"), pytest.raises(Busy, match=message):
        train_text.run(command("--updates", "1", "--mode", "float"))
    message = r"is writing into .*out; .*another --output"
    with locked_folder(tmp_path / "out", "x"), pytest.raises(Busy, match=message):
        train_text.run(command("--prepare-only"))
    assert not (tmp_path / "out").exists()
    assert train_text.run(command("--prepare-only")) == 0
    assert "The data are in " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"text", "vocabulary", "data"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mode int8 --arch transformer", "--arch transformer has no quantisers"),
        ("--mode float --lsq-bits 4", "--arch transformer has no quantisers"),
        ("--max-tokens 40", "--max-tokens 40 is too small for .* --max-length 40 .* at least 41"),
        ("--output a:b", "--output a:b has a name that fairseq takes for"),
        ("--output ${x}", "has a name that fairseq takes for"),
        ("-- --max-update 9", "--max-update after -- is set by lsq train-text .* give --updates"),
        ("--mode int8 --lsq-bits 9", "bits is 9"),
        ("--hidden 24", "hidden is 24, but int8 products need a multiple of 16; use 32"),
        ("--src nowhere.en", "there is no file nowhere.en"),
        ("--src /dev/null", "/dev/null is not a file"),
        ("--vocabulary-size 5000", "--vocabulary-size 5000 is too large"),
        *(
            (f"{option} empty", "empty is empty; it must hold one sentence a line")
            for option in ("--src", "--tgt", "--valid-src", "--test-tgt")
        ),
    ],
)
def test_mistakes(command, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_text.run(command("--updates", "1", *options.split()))


# Small texts


def small_text(folder: Path, *options: str, pairs: int = 200, words: int = 5000) -> list[str]:
    """Options for sentences of ten words of seven letters each, of so many different words."""
    chance = random.Random(1)
    known = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(words)]
    for name in ("train.en", "train.de"):
        lines = (" ".join(chance.choices(known, k=10)) + "\n" for _ in range(pairs))
        (folder / name).write_text("".join(lines))
    files = ["--src", str(folder / "train.en"), "--tgt", str(folder / "train.de")]
    return [*files, "--output", str(folder / "out"), *options]


def test_defaults_are_refused_with_numbers_that_fit(tmp_path):
    both = (
        r"the text is small \(200 lines, 32000 characters on both sides\) for the default"
        " --vocabulary-size 8000 and --updates 10000; give --vocabulary-size 640 --updates 1000"
        " --warmup 100 --validate-every 100, or numbers of"
    )
    size = "default --vocabulary-size 8000; give --vocabulary-size 640, or numbers"
    updates = "default --updates 10000; give --updates 3600 --validate-every 360, or"
    given = "--vocabulary-size=8000 --warmup 20 --max-tokens 300 --update-freq 2"
    for options, pairs, message in (
        ("", 200, both),
        ("--prepare-only", 200, size),
        (given, 400, updates),
    ):
        with pytest.raises(ValueError, match=message):
            train_text.parsed(small_text(tmp_path, *options.split(), pairs=pairs))
    with pytest.raises(ValueError, match="give --vocabulary-size 640 --updates 1000"):
        compare.run(["--seeds", "1", *small_text(tmp_path)])
    assert not (tmp_path / "out").exists()
    # numbers that are given are taken, and larger texts take the defaults
    for options in ("--updates 10000", "--prepare-only"):
        train_text.parsed(small_text(tmp_path, "--vocabulary-size", "8000", *options.split()))
    train_text.parsed(small_text(tmp_path, pairs=8000, words=20_000))


def test_a_vocabulary_has_room_for_characters_and_no_more_pieces_than_words(tmp_path):
    given = small_text(tmp_path, "--prepare-only", words=30)
    # 30 words, 26 letters, two kinds of space
    with pytest.raises(ValueError, match="give --vocabulary-size 58, or"):
        train_text.parsed(given)
    characters = "".join(chr(0x4E00 + number) + "\n" for number in range(1000))
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_text(characters)
    with pytest.raises(ValueError, match="give --vocabulary-size 1100, or"):
        train_text.parsed(given)
