import dataclasses
import os
import signal
from argparse import Namespace
from pathlib import Path

import pytest

from lsq.commands import text_run
from lsq.commands.interruption import Interrupted
from lsq.commands.run_folder import RunFolder
from lsq.commands.text_run import RunOptions
from tests.commands.conftest import SIZES


def options(training=None, extra=(), **given) -> RunOptions:
    defaults = {"name": "x", "updates": 3, "beam": 1, "overwrite": False, "quiet": True}
    return RunOptions(given=Namespace(**(defaults | given)), training=training or {}, extra=extra)


def test_command_line_of_the_training():
    training = {"--arch": "transformer", "--share-all-embeddings": None, "--lr": "0.1"}
    assert options(training=training, extra=["--fp16"]).arguments(Path("data"), Path("model")) == [
        "data",
        "--save-dir",
        "model",
        "--distributed-world-size",
        "1",
        "--arch",
        "transformer",
        "--share-all-embeddings",
        "--lr",
        "0.1",
        "--max-update",
        "3",
        "--fp16",
    ]


def test_finished_run_is_only_reported_again(prepared, monkeypatch):
    """A run whose stamps are there is neither trained nor translated."""
    trained, reported = [], []
    monkeypatch.setattr(text_run, "check_training", lambda *_: None)
    monkeypatch.setattr(text_run, "train_model", lambda *_: trained.append(1))
    monkeypatch.setattr(text_run, "translate", lambda *_: trained.append(2))
    monkeypatch.setattr(text_run, "report", lambda *_: reported.append(3))
    for _ in range(2):
        text_run.run(prepared, options(name="stamped"))
    assert trained == [1, 2] and reported == [3, 3]


def test_a_signal_during_the_translation_leaves_the_training(prepared, monkeypatch):
    monkeypatch.setattr(text_run, "check_training", lambda *_: None)
    monkeypatch.setattr(text_run, "train_model", lambda *_: None)
    monkeypatch.setattr(text_run, "translate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match=str(128 + signal.SIGTERM)) as stopped:
        text_run.run(prepared, options(updates=1))
    assert (
        stopped.value.message == "stopped by SIGTERM"
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    monkeypatch.setattr(text_run, "train_model", None)  # would fail if it were called
    monkeypatch.setattr(text_run, "translate", lambda *_: None)
    monkeypatch.setattr(text_run, "report", lambda *_: {})
    assert text_run.run(prepared, options(updates=1)) == {}


def test_what_is_decoded_is_said_at_the_start(prepared, monkeypatch, capsys):
    for name in ("train_model", "translate", "report"):
        monkeypatch.setattr(text_run, name, lambda *_: None)
    training = {
        "--arch": "lsq_transformer",
        "--max-tokens": "100",
        "--lsq-weight-format": "nvfp4",
        "--cpu": None,
    }
    small = [word for word in SIZES if word not in ("--dropout", "0.1")]
    text_run.run(prepared, options(training=training, extra=small, name="decoded"))
    assert (
        "decoded: multiplied as decoded values, no faster than floats: nvfp4 (12 weights)"
        in capsys.readouterr().out
    )


def test_trains_in_one_process_on_any_number_of_gpus(prepared, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(
        "lsq.commands.train.distributed_utils.call_main", lambda cfg, main: seen.append(cfg)
    )
    training = {"--arch": "transformer", "--max-tokens": "100"}
    folder = RunFolder(prepared=dataclasses.replace(prepared, output=tmp_path), name="mine")
    folder.model.mark({}, finished=False)
    text_run.train_model(prepared, options(training=training), folder)
    assert seen[0].distributed_training.distributed_world_size == 1


def test_the_translation_computes_where_the_training_did(prepared, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(text_run.generate, "run", seen.append)
    monkeypatch.setattr(text_run.generate, "read_hypotheses", lambda *_: [])
    for training in (
        {},
        {"--cpu": None},
        {"--cpu": None, "--lsq-device": "emulator", "--lsq-activations": "bfloat16"},
    ):
        text_run.translate(prepared, options(training=training, max_length=40), tmp_path, tmp_path)
        assert seen[-1][seen[-1].index(str(prepared.vocabulary)) + 1 :] == [
            word for option in training.items() for word in option if word is not None
        ]
