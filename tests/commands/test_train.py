"""`lsq train`: its options and what it refuses, interruptions, and checkpoints."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.trainer import Trainer

from lsq import files
from lsq.commands import train
from lsq.commands.interruption import Interrupted
from lsq.commands.launch import ONE_MACHINE
from lsq.fairseq.compatibility import CheckpointNotWritten
from lsq.files.lock import NAME, Busy, locked_folder
from tests.commands.conftest import TRAINING

FLOAT = ("--arch", "transformer")


def updates(folder: Path) -> int:
    return torch.load(folder / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]


def parse(data: Path, *options: str):
    return train.parse_training([str(data), "--max-tokens", "100", *options])


def test_defaults_are_lsqs_for_its_architectures(prepared):
    args = parse(prepared.data)
    assert args.arch == "lsq_transformer" and args.task == "lsq_translation"
    assert args.criterion == "lsq_label_smoothed_cross_entropy"
    assert args.required_batch_size_multiple == 1 and args.distributed_world_size == 1
    args = parse(prepared.data, "--arch", "transformer")
    assert args.criterion == "cross_entropy" and args.optimizer is None
    args = parse(prepared.data, "--adam-betas", "(0.8, 0.9)")
    assert args.optimizer == "lsq_adam" and args.adam_betas == "(0.8, 0.9)"
    assert not parse(prepared.data, "--bf16").tpu


def test_a_process_for_each_gpu(prepared, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    started = []
    monkeypatch.setattr("os.execv", lambda program, command: started.append(command) or sys.exit(0))
    options = [str(prepared.data), "--max-tokens", "100", "--arch", "transformer"]
    with pytest.raises(SystemExit):
        train.run(options)
    launcher = ["-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", "8"]
    assert started[0][1:] == [*launcher, "-m", "lsq.commands.cli", "train", *options]
    for fault, processes in ((None, 8), ("it is too old", 1)):  # on the CPU
        monkeypatch.setattr("lsq.commands.launch.gpu_fault", lambda fault=fault: fault)
        assert parse(prepared.data).distributed_world_size == processes


def test_help_shows_the_options_of_model_task_and_optimizer(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.run(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    shown = "--lsq-backward --encoder-layers --label-smoothing --source-lang --adam-betas"
    for option in shown.split():
        assert option in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max-tokens 100 --fo 1", "unrecognized arguments: --fo"),
        ("--max-tokens many", "--max-tokens"),
        ("--arch --cpu", "lsq train: error: argument --arch/-a: expected one argument"),
        ("--max-tokens 100 --arch lsq_transformr", "did you mean lsq_transformer"),
    ],
)
def test_mistaken_options(prepared, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        train.run([str(prepared.data), *options.split()])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_data_and_folders_that_are_refused(prepared, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "dict.txt").touch()
    nowhere = tmp_path / "nowhere"
    for data, options, message in (
        (tmp_path / "text", (), "without translations; .* --task lsq_language_modeling"),
        (nowhere, (), "there is no data folder .*nowhere; lsq train-text or fairseq-preprocess"),
        (f"{prepared.data}:{nowhere}", (), "there is no data folder .*nowhere"),
        (prepared.output, (), f"no binarised data in {prepared.output}; give {prepared.data}"),
        (prepared.data, ("--save-dir", str(tmp_path / "file")), "is a file; give a folder"),
        (prepared.data, ("--user-dir", "transformer_lsq"), "is no folder; leave it out for lsq's"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(data, *options)
    with pytest.raises(ValueError, match="--max-tokens .* or --batch-size"):
        train.run([str(prepared.data)])


def test_no_training_begins_anew_over_checkpoints(lsq_train, tmp_path):
    folder = tmp_path / "model"
    lsq_train(folder, "--max-update", "1")
    (folder / "checkpoint_last.pt").unlink()
    best = (folder / "checkpoint_best.pt").read_bytes()
    message = f"holds checkpoint_best.pt, but no .* give --restore-file {folder}/checkp"
    with pytest.raises(ValueError, match=message):
        lsq_train(folder, "--max-update", "2")
    assert (folder / "checkpoint_best.pt").read_bytes() == best
    lsq_train(folder, "--max-update", "2", "--restore-file", str(folder / "checkpoint_best.pt"))
    assert updates(folder) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--encoder-attention-heads 3", "hidden size 16 is not divisible by 3 heads"),
        (
            "--max-tokens 12",
            r"sentence \d+ has \d+ tokens, but a batch has at most 12; raise --max",
        ),
        ("--max-tokens 2 --disable-validation", "no sentence is left to make batches of"),
        ("--store-ema", "lsq_transformer does not support --store-ema"),
        (
            "--arch transformer --best-checkpoint-metric bleu",
            "--best-checkpoint-metric is bleu, which this training does not compute",
        ),
    ],
)
def test_trainings_that_are_refused(lsq_train, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        lsq_train(tmp_path / "model", *options.split(), "--max-update", "1")


@pytest.mark.parametrize(
    ("method", "sent", "options", "said", "written"),
    [
        ("valid_step", signal.SIGTERM, "", "SIGTERM after 2 updates; wrote", True),
        ("get_train_iterator", signal.SIGINT, "", "Ctrl-C (SIGINT) before the first", False),
        ("valid_step", signal.SIGTERM, "--no-save", "was not to write a checkpoint", False),
    ],
)
def test_interruptions(lsq_train, tmp_path, monkeypatch, method, sent, options, said, written):
    """In validation, before the first update, and without checkpoints."""
    monkeypatch.setattr(Trainer, method, lambda *_, **__: os.kill(os.getpid(), sent))
    with pytest.raises(Interrupted) as stopped:
        lsq_train(tmp_path / "model", *FLOAT, "--max-update", "2", *options.split())
    assert stopped.value.code == 128 + sent and said in stopped.value.message
    assert bool(list((tmp_path / "model").glob("*.pt"))) == written


def test_two_trainings_in_one_folder(lsq_train, tmp_path):
    folder = tmp_path / "model"
    with locked_folder(folder, "x"):
        message = rf"process {os.getpid()} on .* is writing into {folder}; .*another --save-dir"
        with pytest.raises(Busy, match=message):
            lsq_train(folder, "--max-update", "1")
        lsq_train(folder, "--max-update", "1", "--no-save")
    few = "--max-tokens 12 --disable-validation --max-update 1".split()
    lsq_train(folder, *FLOAT, *few)
    assert (folder / "checkpoint_last.pt").exists() and not (folder / NAME).exists()
    said = r"\d+ samples have invalid sizes and will be skipped"
    assert re.search(said, (folder / "train.log").read_text())


@pytest.mark.parametrize("name", ["checkpoint_best.pt", "checkpoint_last.pt"])
def test_full_disk_keeps_the_previous_checkpoint(lsq_train, tmp_path, monkeypatch, name):
    """fairseq saves the first of them and copies it to the other."""
    folder = tmp_path / "model"
    lsq_train(folder, *FLOAT, "--max-update", "2")
    before = (folder / name).read_bytes()
    opened = files.open_partial
    with monkeypatch.context() as patch:
        full = {f".{name}.partial": Path("/dev/full")}
        patch.setattr(files, "open_partial", lambda path: opened(full.get(path.name, path)))
        message = f"could not write .*{name} .No space left on device.; the checkpoints"
        with pytest.raises(CheckpointNotWritten, match=message):
            lsq_train(folder, *FLOAT, "--max-update", "4")
    assert (folder / name).read_bytes() == before
    left = {path.name for path in folder.glob("*.pt*")}
    assert left == {"checkpoint_best.pt", "checkpoint_last.pt"}
    lsq_train(folder, *FLOAT, "--max-update", "4")
    assert (folder / name).read_bytes() != before


@pytest.mark.thorough
def test_two_processes_of_torchrun_continue_one_training(prepared, lsq_train, tmp_path):
    lsq_train(tmp_path, *FLOAT, "--max-update", "2", "--disable-validation")
    launcher = ["-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", "2"]
    launcher += ["-m", "lsq.commands.cli", "train", str(prepared.data), "--save-dir", str(tmp_path)]
    options = ["--cpu", *TRAINING, *FLOAT, "--max-update", "3", "--disable-validation"]
    command = [sys.executable, *launcher, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "training on 2 devices" in done.stdout
    assert "Loaded checkpoint" in done.stdout
    assert updates(tmp_path) == 3
