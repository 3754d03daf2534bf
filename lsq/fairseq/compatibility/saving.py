"""Checkpoints on the disk: all of the new file or all of the old."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch

from lsq import files
from lsq.fairseq.compatibility import soundness

CRASH = "crash.pt"
"""What fairseq writes, for whoever looks for the fault, before a training ends by an error."""


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; whatever stood under its name before is untouched."""


def save_checkpoint(content: object, filename: str, async_write: bool = False) -> None:
    """Takes the place of fairseq's torch_persistent_save; `async_write` is for remote paths, which
    lsq does not know.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
        FloatingPointError: the model holds NaN or infinity; only crash.pt is written nevertheless.
    """
    if isinstance(content, dict) and os.path.basename(filename) != CRASH:
        found = soundness.not_finite(content.get("model"))
        if found is not None:
            raise FloatingPointError(
                f"{found}; {filename} is not written, and earlier checkpoints are kept"
            )
    write_whole(filename, lambda file: torch.save(content, file))


def copy_checkpoint(source: str, target: str, overwrite: bool = False) -> bool:
    """Takes the place of fairseq's PathManager.copy; returns True.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
    if not overwrite and os.path.exists(target):
        raise FileExistsError(f"{target} exists")
    with open(source, "rb") as original:
        write_whole(target, lambda file: shutil.copyfileobj(original, file))
    return True


def write_whole(filename: str, make: Callable[[BinaryIO], object]) -> None:
    """`lsq.files.write`, with an error that says what is left.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
    try:
        files.write(Path(filename), make)
    except (OSError, RuntimeError) as error:
        reason = _refusal(error)
        if reason is None:
            raise
        raise CheckpointNotWritten(
            f"could not write {filename} ({reason.strerror}); the checkpoints that were there"
            " before are kept"
        ) from error


def _refusal(error: BaseException | None) -> OSError | None:
    """What the file system said: torch.save hides it behind a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
