"""Checkpoints on the disk: all of the new file or all of the old."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from lsq.fairseq.compatibility import soundness
from lsq.files import PARTIAL

_fairseq_save = checkpoint_utils.torch_persistent_save
_fairseq_copy = PathManager.copy
CRASH = "crash.pt"
"""What fairseq writes, for whoever looks for the fault, before a training ends by an error."""


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; whatever stood under its name before is untouched."""


def save_checkpoint(content: object, filename: str, async_write: bool = False) -> None:
    """Takes the place of fairseq's torch_persistent_save; `async_write` is for remote paths only.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
        FloatingPointError: the model holds NaN or infinity; only crash.pt is written nevertheless.
    """
    if isinstance(content, dict) and os.path.basename(filename) != CRASH:
        found = soundness.not_finite(content.get("model"))
        if found is not None:
            raise FloatingPointError(f"{found}; {filename} is not written, and earlier checkpoints are kept")
    if PathManager.path_requires_pathmanager(filename):
        _fairseq_save(content, filename, async_write)
        return
    write_whole(filename, lambda file: torch.save(content, file))


def copy_checkpoint(source: str, target: str, overwrite: bool = False) -> bool:
    """Takes the place of fairseq's PathManager.copy; returns True.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
    if PathManager.path_requires_pathmanager(source) or PathManager.path_requires_pathmanager(target):
        return _fairseq_copy(source, target, overwrite)
    if not overwrite and os.path.exists(target):
        raise FileExistsError(f"{target} exists")
    with open(source, "rb") as original:
        write_whole(target, lambda file: shutil.copyfileobj(original, file))
    return True


def write_whole(filename: str, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with a temporary file beside `filename`, then rename it: all of the new file or all of the old.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
    temporary = Path(filename).with_name(f".{os.path.basename(filename)}{PARTIAL}")
    try:
        with open_partial(temporary) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, filename)
    except (OSError, RuntimeError) as error:
        reason = _refusal(error)
        if reason is None:
            raise
        raise CheckpointNotWritten(
            f"could not write {filename} ({reason.strerror}); the checkpoints that were there before are kept"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def open_partial(path: Path) -> BinaryIO:
    """A file of a fixed name, so that what a killed process left does not pile up; never through somebody's link.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb")


def _refusal(error: BaseException | None) -> OSError | None:
    """What the file system said: torch.save hides it behind a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
