import json
import os
import signal

import fairseq_cli.train as fairseq_train
import pytest
import torch
from fairseq.trainer import Trainer

from lsq.commands import train_text
from lsq.commands.interruption import Interrupted
from lsq.commands.losses import read_losses
from tests.commands.small_runs import results_of


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        pytest.param(
            ["--mode", "float"], "label_smoothed_cross_entropy", marks=pytest.mark.thorough
        ),
        (["--mode", "int8", "--lsq-backward", "int8"], "lsq_label_smoothed_cross_entropy"),
        (
            ["--mode", "float", "--arch", "lsq_transformer", "--name", "other"],
            "lsq_label_smoothed_cross_entropy",
        ),
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


def test_interrupted_run_continues(command, tmp_path, stop_at):
    arguments = command("--updates", "4", "--mode", "float")
    folder = tmp_path / "out" / "float"
    stop_at(2, arguments)
    assert not (folder / "results.json").exists()
    assert train_text.run(arguments) == 0
    assert results_of(folder)["updates"] == 4
    assert "(epoch 1 @ 2 updates)" in (folder / "model" / "train.log").read_text()


@pytest.mark.thorough
def test_time_of_all_sittings_counts(command, tmp_path, stop_at):
    arguments = command("--updates", "4", "--mode", "float")
    losses = tmp_path / "out" / "float" / "model" / "losses.jsonl"
    stop_at(2, arguments)
    lines = [json.loads(line) for line in losses.read_text().splitlines()]
    losses.write_text(
        "".join(json.dumps(line | {"seconds": line["seconds"] + 1000}) + "\n" for line in lines)
    )
    assert train_text.run(arguments) == 0
    seconds = [json.loads(line)["seconds"] for line in losses.read_text().splitlines()]
    assert (
        1000 < seconds[-1] < 1100
        and seconds == sorted(seconds)
        and seconds[-1] > seconds[len(lines) - 1]
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("updates", "place"), [(4, "validation"), (4, "update"), (5, "validation")]
)
def test_a_validation_that_was_interrupted_is_made_up_for(
    command, tmp_path, monkeypatch, updates, place
):
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
        assert f"after {last} updates" in said and said.endswith(
            "the same command goes on from there"
        )
    train_text.run([*arguments, "--name", "parts"])
    whole, parts = tmp_path / "out" / "whole", tmp_path / "out" / "parts"
    for name in ("updates", "best_update", "best_validation_loss", "bleu", "chrf"):
        assert results_of(parts)[name] == results_of(whole)[name], name
    curves = [
        read_losses(folder / "model" / "losses.jsonl").validation for folder in (whole, parts)
    ]
    assert curves[0] == curves[1]
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        states = [torch.load(folder / "model" / name) for folder in (whole, parts)]
        assert all(
            torch.equal(states[0]["model"][key], states[1]["model"][key])
            for key in states[0]["model"]
        )
        assert states[0]["extra_state"]["best"] == states[1]["extra_state"]["best"]
        assert (
            states[0]["extra_state"]["train_iterator"] == states[1]["extra_state"]["train_iterator"]
        )


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_progress_without_a_terminal(command, capsys):
    arguments = [word for word in command("--updates", "2", "--mode", "float") if word != "--quiet"]
    train_text.run(arguments)
    printed = capsys.readouterr().out
    assert (
        "float: training; the log is " in printed and "update 2 of 2: validation loss " in printed
    )
    train_text.run([*arguments, "--updates", "3"])
    assert "float: going on from update 2; the log is " in capsys.readouterr().out


@pytest.mark.thorough
def test_more_updates_go_on_from_a_finished_run(command, tmp_path, capsys):
    arguments = command("--mode", "int8")
    train_text.run([*arguments, "--updates", "2"])
    train_text.run(
        [*arguments, "--updates", "5", "--beam", "1", "--log-every", "2", "--validate-every", "3"]
    )
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


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_text.run(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for option in (
        "--src",
        "--test-tgt",
        "--vocabulary-size",
        "--mode",
        "--lsq-backward",
        "--lsq-from",
        "--seed",
    ):
        assert option in printed
