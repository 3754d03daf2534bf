import json
import os
import signal
from pathlib import Path

import fairseq_cli.train as fairseq_train
import pytest
import torch
from fairseq.trainer import Trainer

from lsq.commands import train_text
from lsq.commands.interruption import Interrupted
from lsq.commands.losses import read_losses
from lsq.lock import Busy, locked_folder

SMALL = (
    "--vocabulary-size 60 --character-coverage 1.0 --max-length 40 --layers 1 --hidden 16 --feed-forward 32 --heads 2 "
    "--max-tokens 300 --warmup 4 --log-every 1 --validate-every 2 --beam 2 --quiet"
).split()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """To draw one takes as long as one of these trainings; test_losses.py and test_numbers.py do."""
    monkeypatch.setattr("lsq.commands.losses.Figure.savefig", lambda figure, path, **_: path.write_bytes(b""))


@pytest.fixture
def command(files, tmp_path):
    """command(*options): the command line of a small run into tmp_path/out."""

    def command(*options: str) -> list[str]:
        given = ["--src", str(files["train"][0]), "--tgt", str(files["train"][1]), "--output", str(tmp_path / "out")]
        for split in ("valid", "test"):
            source, target = files[split]
            given += [f"--{split}-src", str(source), f"--{split}-tgt", str(target)]
        return [*given, *SMALL, *options]

    return command


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        (["--mode", "float"], "label_smoothed_cross_entropy"),
        (["--mode", "int8", "--lsq-backward", "int8"], "lsq_label_smoothed_cross_entropy"),
        (["--mode", "float", "--arch", "lsq_transformer", "--name", "other"], "lsq_label_smoothed_cross_entropy"),
    ],
)
def test_from_text_to_scores(command, tmp_path, capsys, options, criterion):
    arguments = command("--updates", "3", *options, "--", "--encoder-normalize-before")
    assert train_text.run(arguments) == 0
    name = options[-1] if "--name" in options else options[1]
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


def test_prepare_only(command, tmp_path, capsys):
    assert train_text.run(command("--prepare-only")) == 0
    assert "The data are in " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"text", "vocabulary", "data"}


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


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_interrupted_run_continues(command, tmp_path, stop_at):
    arguments = command("--updates", "4", "--mode", "float")
    folder = tmp_path / "out" / "float"
    stop_at(2, arguments)
    assert not (folder / "results.json").exists()
    assert train_text.run(arguments) == 0
    assert results_of(folder)["updates"] == 4
    assert "(epoch 1 @ 2 updates)" in (folder / "model" / "train.log").read_text()


def test_time_of_all_sittings_counts(command, tmp_path, stop_at):
    arguments = command("--updates", "4", "--mode", "float")
    losses = tmp_path / "out" / "float" / "model" / "losses.jsonl"
    stop_at(2, arguments)
    lines = [json.loads(line) for line in losses.read_text().splitlines()]
    losses.write_text("".join(json.dumps(line | {"seconds": line["seconds"] + 1000}) + "\n" for line in lines))
    assert train_text.run(arguments) == 0
    seconds = [json.loads(line)["seconds"] for line in losses.read_text().splitlines()]
    assert 1000 < seconds[-1] < 1100 and seconds == sorted(seconds) and seconds[-1] > seconds[len(lines) - 1]


@pytest.mark.parametrize(("updates", "place"), [
    pytest.param(4, "validation", marks=pytest.mark.thorough), (5, "validation"), (4, "update"),
])  # fmt: skip
def test_a_validation_that_was_interrupted_is_made_up_for(command, tmp_path, monkeypatch, updates, place):
    """At the last update, too: none is made beyond --updates."""
    arguments = command("--updates", str(updates), "--mode", "float")
    train_text.run([*arguments, "--name", "whole"])
    last, step, validate = updates // 2 * 2, Trainer.train_step, fairseq_train.validate

    def signal_at(wanted: str, trainer: Trainer, made: int) -> None:
        if wanted == place and made == (last if wanted == "validation" else last - 1):
            os.kill(os.getpid(), signal.SIGINT)

    def train_step(trainer, samples, raise_oom=False):
        signal_at("update", trainer, trainer.get_num_updates())
        return step(trainer, samples, raise_oom)

    def interrupted(cfg, trainer, *others):
        signal_at("validation", trainer, trainer.get_num_updates())
        return validate(cfg, trainer, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(fairseq_train, "validate", interrupted)
        with pytest.raises(Interrupted) as stopped:
            train_text.run([*arguments, "--name", "parts"])
        said = stopped.value.message
        assert f"after {last} updates" in said and said.endswith("the same command goes on from there")
    train_text.run([*arguments, "--name", "parts"])
    whole, parts = tmp_path / "out" / "whole", tmp_path / "out" / "parts"
    for name in ("updates", "best_update", "best_validation_loss", "bleu", "chrf"):
        assert results_of(parts)[name] == results_of(whole)[name], name
    curves = [read_losses(folder / "model" / "losses.jsonl").validation for folder in (whole, parts)]
    assert curves[0] == curves[1]
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        states = [torch.load(folder / "model" / name) for folder in (whole, parts)]
        assert all(torch.equal(states[0]["model"][key], states[1]["model"][key]) for key in states[0]["model"])
        assert states[0]["extra_state"]["best"] == states[1]["extra_state"]["best"]
        assert states[0]["extra_state"]["train_iterator"] == states[1]["extra_state"]["train_iterator"]


def test_wrong_options_remove_nothing_and_bind_nobody(command, tmp_path):
    train_text.run(command("--updates", "1"))
    before = files_in(tmp_path / "out")
    wrong = "--heads 3", "--lsq-bits 9", "--lr nan", "--lsq-from nowhere.pt", "-- --no-such-option"
    for options in map(str.split, wrong):
        with pytest.raises((ValueError, FileNotFoundError, SystemExit)):
            train_text.run(command("--updates", "1", "--overwrite", *options))
        assert files_in(tmp_path / "out") == before, options
        with pytest.raises((ValueError, FileNotFoundError, SystemExit)):
            train_text.run(command("--updates", "1", "--name", "new", *options))
        assert not (tmp_path / "out" / "new").exists(), options


def test_a_training_that_ends_by_time_goes_on(command, tmp_path):
    folder = tmp_path / "out" / "float"
    train_text.run(command("--updates", "40", "--mode", "float", "--", "--stop-time-hours", "1e-9"))
    assert results_of(folder)["updates"] < 10
    train_text.run(command("--updates", "10", "--mode", "float"))
    assert results_of(folder)["updates"] == 10


def test_damaged_checkpoints_of_a_finished_run_are_named(command, tmp_path):
    arguments = command("--updates", "1", "--mode", "float")
    train_text.run(arguments)
    best = tmp_path / "out" / "float" / "model" / "checkpoint_best.pt"
    best.write_bytes(best.read_bytes()[:3000])
    with pytest.raises(ValueError, match=f"{best} is damaged .*checkpoint_last.pt: give that one"):
        train_text.run(arguments)
    best.unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint {best}; the newest sound"):
        train_text.run(arguments)


def test_progress_without_a_terminal(command, capsys):
    arguments = [word for word in command("--updates", "2", "--mode", "float") if word != "--quiet"]
    train_text.run(arguments)
    printed = capsys.readouterr().out
    assert "float: training; the log is " in printed and "update 2 of 2: validation loss " in printed
    train_text.run([*arguments, "--updates", "3"])
    assert "float: going on from update 2; the log is " in capsys.readouterr().out


def test_more_updates_go_on_from_a_finished_run(command, tmp_path, capsys):
    arguments = command("--mode", "int8")
    train_text.run([*arguments, "--updates", "2"])
    train_text.run([*arguments, "--updates", "5", "--beam", "1", "--log-every", "2", "--validate-every", "3"])
    folder = tmp_path / "out" / "int8"
    assert "(epoch 1 @ 2 updates)" in (folder / "model" / "train.log").read_text()
    assert results_of(folder)["updates"] == results_of(folder)["best_update"] == 5
    with pytest.raises(ValueError, match=r"--updates is 4, but .* has made 5 already"):
        train_text.run([*arguments, "--updates", "4"])

    train_text.run([*arguments, "--updates", "5", "--name", "at-once"])
    resumed, at_once = (
        torch.load(tmp_path / "out" / name / "model" / "checkpoint_last.pt")["model"] for name in ("int8", "at-once")
    )
    assert resumed.keys() == at_once.keys()
    assert all(torch.equal(resumed[name], at_once[name]) for name in resumed)


def test_names_do_not_leave_the_output_folder(command, tmp_path):
    thesis = tmp_path / "home" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("x")
    for name in ("../home", "..", "data", str(tmp_path / "home")):
        with pytest.raises(ValueError, match="--name"):
            train_text.run(command("--updates", "2", "--name", name, "--overwrite"))
    assert thesis.exists() and not (tmp_path / "out").exists()


def test_folders_of_somebody_else_stay(command, tmp_path):
    theirs = tmp_path / "out" / "data" / "dict.src.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    with pytest.raises(ValueError, match="holds dict.src.txt, which this command did not make"):
        train_text.run(command("--updates", "2", "--overwrite"))
    assert files_in(tmp_path / "out") == {"data/dict.src.txt": b"x"}


def test_options_that_do_not_fit_are_refused_before_anything_is_written(command, tmp_path):
    train_text.run(command("--updates", "1", "--mode", "float"))
    before = files_in(tmp_path / "out")
    message = r"holds a run with other options \(--vocabulary-size: 60 before, 70 now\)"
    with pytest.raises(ValueError, match=message):
        train_text.run(command("--updates", "1", "--mode", "float", "--vocabulary-size", "70"))
    for options in (["--mode", "int8", "--updates", "1"], ["--mode", "int8", "--overwrite"], ["--prepare-only"]):
        with pytest.raises(ValueError, match=r"the data of the run float, .*--vocabulary-size: 60 before, 70 now"):
            train_text.run(command(*options, "--vocabulary-size", "70"))
    assert files_in(tmp_path / "out") == before
    train_text.run(command("--updates", "1", "--mode", "float", "--vocabulary-size", "70", "--overwrite"))
    assert results_of(tmp_path / "out" / "float")["options"]["--vocabulary-size"] == 70


def test_a_second_writer_is_refused(command, tmp_path):
    with locked_folder(tmp_path / "out" / "float", "x"):
        with pytest.raises(Busy, match=rf"process {os.getpid()} on .* is writing into .*float; .*another --name"):
            train_text.run(command("--updates", "1", "--mode", "float"))
    with locked_folder(tmp_path / "out", "x"):
        with pytest.raises(Busy, match=r"is writing into .*out; .*another --output"):
            train_text.run(command("--prepare-only"))
    assert not (tmp_path / "out").exists()


def test_changed_options_need_another_name_or_overwrite(command, tmp_path):
    arguments = command("--updates", "2", "--mode", "float")
    assert train_text.run(arguments) == 0
    changed = [*arguments, "--lr", "0.01"]
    with pytest.raises(ValueError, match=r"other options \(--lr: 0.001 before, 0.01 now\); choose another --name"):
        train_text.run(changed)
    assert train_text.run([*changed, "--overwrite"]) == 0
    assert results_of(tmp_path / "out" / "float")["options"]["--lr"] == "0.01"
    assert train_text.run([*changed, "--beam", "1"]) == 0  # translates again, trains no more
    log = (tmp_path / "out" / "float" / "model" / "train.log").read_text()
    assert log.count("begin training epoch 1") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "int8", "--arch", "transformer"], "--arch transformer has no quantisers"),
        (["--mode", "float", "--lsq-bits", "4"], "--arch transformer has no quantisers"),
        (["--max-tokens", "40"], "--max-tokens 40 is too small for sentences of --max-length 40 .* at least 41"),
        (["--output", "a:b"], "--output a:b has a name that fairseq takes for"),
        (["--output", "${x}"], "has a name that fairseq takes for"),
        (["--", "--max-update", "9"], "--max-update after -- is set by lsq train-text itself; .* give --updates"),
        (["--", "--save-dir=x"], "--save-dir after -- .* give --output and --name"),
        (["--mode", "int8", "--lsq-bits", "9"], "bits is 9"),
        (["--hidden", "24"], "hidden is 24, but int8 products need a multiple of 16; use 32"),
        (["--heads", "3"], "hidden size 16 is not divisible by 3 heads"),
        (["--src", "nowhere.en"], "there is no file nowhere.en"),
        (["--vocabulary-size", "5000"], "--vocabulary-size 5000 is too large"),
    ],
)
def test_mistakes(command, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_text.run(command("--updates", "1", *options))


def test_half_a_pair_of_files(files, tmp_path):
    given = ["--src", str(files["train"][0]), "--tgt", str(files["train"][1]), "--output", str(tmp_path)]
    with pytest.raises(ValueError, match="--test-src and --test-tgt go together"):
        train_text.run([*given, "--test-src", str(files["test"][0])])


def test_unknown_options(command, capsys):
    for arguments in (command("--learning-rate", "1"), command("--updates", "1", "--", "--no-such-option")):
        with pytest.raises(SystemExit) as stopped:
            train_text.run(arguments)
        assert stopped.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_text.run(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--src", "--test-tgt", "--vocabulary-size", "--mode", "--lsq-backward", "--lsq-from", "--seed"):
        assert option in printed
