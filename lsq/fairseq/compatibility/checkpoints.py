"""Checkpoints on the disk: only undamaged files are read, a file is replaced whole or not at all,
and only one training at a time writes into a folder (--save-dir)."""

import argparse
import atexit
import contextlib
import logging
import os
import shutil
import typing
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import fairseq.distributed.utils
import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from numpy._core import multiarray
from torch import Tensor

from lsq import files
from lsq.fairseq.checkpoint import LAST, say_formats
from lsq.files import check_name, loading_fault
from lsq.files.lock import locked_folder
from lsq.layers.clip_format import declare_numbers

logger = logging.getLogger(__name__)

_fairseq_load_training = Trainer.load_checkpoint
_fairseq_load = checkpoint_utils.load_checkpoint_to_cpu
ADAMS = {"adam": "FairseqAdam", "lsq_adam": "LSQAdam"}
"""Optimizer -> its class, as checkpoints name it; their states are interchangeable."""
CRASH = "crash.pt"
"""File that fairseq writes before a training ends by an error."""


NO_CHECKSUMS = "it has no checksums"


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; an older file of its name is untouched."""


def damage(path: str | Path) -> str | None:
    """Check the CRC-32 of each record in a file of torch.save, which PyTorch writes and never
    reads: half a second for a gigabyte.

    Returns:
        None if they all fit; NO_CHECKSUMS if it is no zip file, as before PyTorch 1.6; else what is
            wrong.
    """
    with open(path, "rb") as file:
        start = file.read(4)
        if not start:
            return "it is empty"
        if not b"PK\3\4".startswith(start) and not zipfile.is_zipfile(file):
            return NO_CHECKSUMS
        try:
            with zipfile.ZipFile(file) as archive:
                odd = [record.filename for record in archive.infolist() if not _plain(record)]
                if odd:
                    return f"its record {odd[0]!r} is not as PyTorch writes it"
                bad = archive.testzip()
        except zipfile.BadZipFile:
            return "its end is missing or its table of contents is unreadable"
        except Exception as error:  # zipfile does not check its headers
            text = str(error)[:200] or type(error).__name__
            return f"its table of contents is unreadable: {text}"
    return None if bad is None else f"the checksum of its record {bad!r} does not fit"


def _plain(record: zipfile.ZipInfo) -> bool:
    """Return whether a record is neither packed nor a folder; PyTorch misreads others."""
    stored = record.compress_type == zipfile.ZIP_STORED and record.file_size == record.compress_size
    return stored and not record.external_attr & 0x10


def newest_sound(path: str | Path) -> Path | None:
    """Find the undamaged checkpoint of the most updates beside `path`, the last written one of
    equals, or None. Files that do not say their updates come after all others."""
    others = [
        file
        for file in Path(path).absolute().parent.glob("checkpoint*.pt")
        if file.is_file() and file.name != Path(path).name
    ]

    def age(file: Path) -> tuple[int, float]:
        try:
            updates = updates_in(file)
        except Exception:  # see updates_in
            updates = -1
        return updates, file.stat().st_mtime

    return max((file for file in others if damage(file) is None), key=age, default=None)


def updates_in(path: str | Path) -> int:
    """Read the updates of a sound checkpoint; raises any Exception if it is not fairseq's."""
    state = torch.load(path, map_location="cpu", mmap=True)
    return int(state["optimizer_history"][-1]["num_updates"])


def beside(path: str | Path) -> str:
    """Return the end of a message about an unusable file: the checkpoint to use instead, if any."""
    other = newest_sound(path)
    if other is None:
        return ""
    return (
        f"; the newest sound checkpoint beside it is {other.name}: give that one, or copy it"
        " over this one"
    )


def not_finite(state: object, name: str = "") -> str | None:
    """Name the first tensor in nested mappings and sequences that holds NaN or infinity."""
    for full_name, tensor in tensors(state, name):
        # a sum shows both; but it may also overflow, so count them
        if tensor.is_floating_point() and not tensor.sum().isfinite():
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            if count:
                return (
                    f"{full_name} holds {count} values of {tensor.numel()} that are NaN or infinite"
                )
    return None


def tensors(state: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) of everything in nested mappings and sequences."""
    items: object = ()
    if isinstance(state, Tensor):
        yield name, state.detach()
    elif isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        items = enumerate(state)
    for key, value in items:
        yield from tensors(value, f"{name}.{key}" if name else str(key))


def require_file(path: str | Path) -> None:
    """Raise an error for a file that fairseq would take for a missing checkpoint: a folder,
    nothing, a link to nothing, or a name that is not UTF-8."""
    check_name(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; give one of the checkpoints in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no checkpoint {path}{beside(path)}")


def register_types() -> None:
    """Let torch.load accept the types in checkpoints and in messages between processes."""
    of_numpy = [numpy.ndarray, numpy.dtype, multiarray._reconstruct, multiarray.scalar]
    dtypes = ("bool", "int32", "int64", "float32", "float64")
    of_numpy += [type(numpy.dtype(name)) for name in dtypes]
    of_omegaconf = [omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.base.ContainerMetadata]
    of_omegaconf += [omegaconf.base.Metadata, omegaconf.nodes.AnyNode, typing.Any]
    own = [argparse.Namespace, fairseq.distributed.utils._TensorPlaceholder]
    torch.serialization.add_safe_globals(
        [*own, *of_numpy, *of_omegaconf, defaultdict, dict, list, int]
    )


@contextlib.contextmanager
def replaced(module: object, **attributes: object) -> Iterator[None]:
    """Replace attributes of a module within this context."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def load_checkpoint(
    path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False
) -> dict:
    """Replace load_checkpoint_to_cpu, which reads no checksums.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is damaged, no checkpoint of fairseq's, or holds unsafe types, or a tensor of
            the model or the optimizer has NaN or infinity.
    """
    require_file(path)
    fault = damage(path)
    if fault not in (None, NO_CHECKSUMS):
        raise ValueError(f"{path} is damaged: {fault}{beside(path)}")
    try:
        state = _fairseq_load(path, arg_overrides, load_on_all_ranks)
        tensors = {"": state["model"], "last_optimizer_state": state.get("last_optimizer_state")}
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path} is not a checkpoint of fairseq's ({loading_fault(error)}){beside(path)}"
        ) from error
    if fault == NO_CHECKSUMS:
        logger.warning(
            "%s is of PyTorch before 1.6 and has no checksums, so that damage would not be noticed",
            path,
        )
    for name, part in tensors.items():
        if fault := not_finite(part, name):
            raise ValueError(f"{path} cannot be used: {fault}{beside(path)}")
    declare_numbers(state["model"])
    say_formats(state["model"], path)
    return state


def updates_of(path: str | os.PathLike) -> int:
    """Return the number of updates of a checkpoint, without reading its tensors. FileNotFoundError,
    IsADirectoryError or ValueError: it is missing, damaged, or not fairseq's."""
    require_file(path)
    fault = damage(path)
    try:
        if fault is None:
            return updates_in(path)
    except Exception as error:  # a damaged file can raise anything
        fault = loading_fault(error)
    raise ValueError(f"{path} is damaged or no checkpoint of fairseq's: {fault}{beside(path)}")


def load_training(
    trainer: Trainer, filename: str, *arguments: object, **options: object
) -> dict | None:
    """Replace Trainer.load_checkpoint, which begins anew if a requested file is missing; raises as
    `load_checkpoint`.

    A task that has `check_resumed` gets its state in the checkpoint, unless that is only finetuned
    from. adam and lsq_adam can go on from each other's checkpoints.
    """
    asked_for = trainer.cfg.checkpoint.restore_file != LAST
    if asked_for or os.path.lexists(filename):
        require_file(filename)
    check = getattr(trainer.task, "check_resumed", None)
    if check is None or filename == trainer.cfg.checkpoint.finetune_from_model:
        return _fairseq_load_training(trainer, filename, *arguments, **options)

    def load_fitting(*arguments: object, **options: object) -> dict:
        state = load_checkpoint(*arguments, **options)
        check(state.get("task_state", {}))
        history = state.get("optimizer_history")
        name = ADAMS.get(getattr(trainer.cfg.optimizer, "_name", None))
        if history and name and history[-1].get("optimizer_name") in ADAMS.values():
            history[-1]["optimizer_name"] = name
        return state

    with replaced(checkpoint_utils, load_checkpoint_to_cpu=load_fitting):
        return _fairseq_load_training(trainer, filename, *arguments, **options)


def save_checkpoint(content: object, filename: str, async_write: bool = False) -> None:
    """Replace torch_persistent_save. CheckpointNotWritten: the file system refuses, e.g. because it
    is full. FloatingPointError: the model holds NaN or infinity, and the file is not crash.pt."""
    if isinstance(content, dict) and os.path.basename(filename) != CRASH:
        if fault := not_finite(content.get("model")):
            raise FloatingPointError(
                f"{fault}; {filename} is not written, and earlier checkpoints are kept"
            )
    _write_whole(filename, lambda file: torch.save(content, file))


def copy_checkpoint(source: str, target: str, overwrite: bool = False) -> bool:
    """Replace PathManager.copy, which returns True; see `save_checkpoint`."""
    if not overwrite and os.path.exists(target):
        raise FileExistsError(f"{target} exists")
    with open(source, "rb") as original:
        _write_whole(target, lambda file: shutil.copyfileobj(original, file))
    return True


def _write_whole(filename: str, make: Callable[[BinaryIO], object]) -> None:
    try:
        files.write(Path(filename), make)
    except (OSError, RuntimeError) as error:
        # torch.save hides the file system's error behind a RuntimeError
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__context__
        if reason is None:
            raise
        raise CheckpointNotWritten(
            f"could not write {filename} ({reason.strerror}); the checkpoints that were there"
            " before are kept"
        ) from error


# global, because fairseq claims a folder by a function and never releases it
_held = contextlib.ExitStack()


def claim_folder(folder: str) -> None:
    """Replace verify_checkpoint_directory, which the first process calls before a training. It
    locks the folder until `release_folder`. Busy names the process that writes there already;
    OSError: the folder cannot be written."""
    release_folder()
    _held.enter_context(locked_folder(Path(folder), "choose another --save-dir"))


def release_folder() -> None:
    """Unlock the folder of `claim_folder`."""
    _held.close()


atexit.register(release_folder)
