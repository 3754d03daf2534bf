"""Training through fairseq: resumable to the bit, alone or with others, by the folder for
--user-dir."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lsq
from lsq.fairseq.task import LSQTranslationTask
from tests.fairseq.conftest import SHORT, TINY
from tests.fairseq.two_workers import train_by_two

USER_DIR = Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """The loss of every batch that is trained on."""
    found = []
    original = LSQTranslationTask.train_step

    def train_step(*arguments, **options):
        result = original(*arguments, **options)
        found.append(result[2]["loss"].item())
        return result

    monkeypatch.setattr(LSQTranslationTask, "train_step", train_step)
    return found


@pytest.mark.parametrize(
    "options",
    [
        "--lsq-backward int8 --update-freq 2",
        "--lsq-sparsity 2:4,every=2,begin=1",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("", "--lsq-mode float")),
    ],
)
def test_resuming_continues_to_the_bit(train, losses, tmp_path, options):
    whole = train(tmp_path / "whole", f"--max-update 6 {options}")["model"]
    expected = losses.copy()
    train(tmp_path / "parts", f"--max-update 3 {options}")
    parts = train(tmp_path / "parts", f"--max-update 6 {options}")["model"]
    assert losses[len(expected) :] == expected
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_user_dir_contains_one_folder_of_a_name_that_nobody_else_has():
    entries = [path.name for path in USER_DIR.parent.iterdir() if path.name != "__pycache__"]
    assert entries == ["lsq_fairseq"]


def command(toy, folder, options: str) -> list[str]:
    return [
        str(toy),
        "--user-dir",
        str(USER_DIR),
        *TINY,
        *SHORT,
        "--save-dir",
        str(folder),
        *options.split(),
    ]


def test_fairseq_train_needs_only_the_user_dir(toy, tmp_path):
    script = "import sys; from fairseq_cli.train import cli_main; sys.exit(cli_main())"
    given = [sys.executable, "-c", script, *command(toy, tmp_path, "--max-update 2")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(given, env=one_thread, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Quantised tensors at update 1" in done.stdout + done.stderr
    assert (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    "criterion",
    [
        "lsq_label_smoothed_cross_entropy",
        pytest.param("label_smoothed_cross_entropy", marks=pytest.mark.thorough),
    ],
)
def test_two_processes_end_with_the_same_parameters(toy, tmp_path, criterion):
    given = command(toy, tmp_path / "save", f"--max-update 3 --criterion {criterion}")
    _, (first, second) = train_by_two(tmp_path, given)
    assert any(name.endswith("_clip") for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("clips", ["absmax", pytest.param("learned", marks=pytest.mark.thorough)])
def test_two_processes_share_clips_whatever_wraps_the_model(toy, tmp_path, clips):
    given = command(toy, tmp_path / "save", f"--max-update 3 --lsq-clips {clips}")
    _, (first, second) = train_by_two(tmp_path, given, ddp="legacy_ddp")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("checksums", ["x", {}, {"source": torch.zeros(3), "target": None}])
def test_checksums_of_dictionaries_that_are_none(build, checksums):
    task, _ = build()
    task.load_state_dict(task.state_dict())
    with pytest.raises(
        ValueError, match="has another source and target dictionary than the checkpoint was trained"
    ):
        task.load_state_dict({"lsq_dictionaries": checksums})
