"""Checkpoints on the disk: whole files alone are read, all of a new file or all of the old stays,
and one training at a time writes into a folder (--save-dir)."""

import argparse
import atexit
import contextlib
import logging
import os
import shutil
import typing
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import fairseq.distributed.utils
import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from numpy._core import multiarray

from lsq import files
from lsq.fairseq.checkpoint import LAST, say_formats
from lsq.fairseq.compatibility import soundness
from lsq.fairseq.compatibility.training import replaced
from lsq.files import loading_fault
from lsq.files.lock import locked_folder

logger = logging.getLogger(__name__)

_fairseq_load_training = Trainer.load_checkpoint
_fairseq_load = checkpoint_utils.load_checkpoint_to_cpu
ADAMS = {"adam": "FairseqAdam", "lsq_adam": "LSQAdam"}
"""Names of optimizers -> their classes, as checkpoints name them; their states are the same."""
CRASH = "crash.pt"
"""File that fairseq writes before a training ends by an error, for debugging."""


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; whatever stood under its name before is untouched."""


def register_types() -> None:
    """Let torch.load take the types in fairseq's checkpoints, as on disk and as processes send them
    to each other."""
    of_numpy = [numpy.ndarray, numpy.dtype, multiarray._reconstruct, multiarray.scalar]
    dtypes = ("bool", "int32", "int64", "float32", "float64")
    of_numpy += [type(numpy.dtype(name)) for name in dtypes]
    of_omegaconf = [omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.base.ContainerMetadata]
    of_omegaconf += [omegaconf.base.Metadata, omegaconf.nodes.AnyNode, typing.Any]
    own = [argparse.Namespace, fairseq.distributed.utils._TensorPlaceholder]
    torch.serialization.add_safe_globals(
        [*own, *of_numpy, *of_omegaconf, defaultdict, dict, list, int]
    )


def load_checkpoint(
    path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False
) -> dict:
    """Replace load_checkpoint_to_cpu, which reads no checksums.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: the file is damaged or no checkpoint of fairseq's, or holds types that are not
            safe to load, or NaN or infinity in a tensor of the model or the optimizer.
    """
    soundness.require_file(path)
    damage = soundness.damage(path)
    if damage is not None and damage != soundness.NO_CHECKSUMS:
        raise ValueError(f"{path} is damaged: {damage}{soundness.beside(path)}")
    try:
        state = _fairseq_load(path, arg_overrides, load_on_all_ranks)
        tensors = {"": state["model"], "last_optimizer_state": state.get("last_optimizer_state")}
    except Exception as error:  # whatever is in the file decides what fails
        fault = loading_fault(error)
        raise ValueError(
            f"{path} is not a checkpoint of fairseq's ({fault}){soundness.beside(path)}"
        ) from error
    if damage == soundness.NO_CHECKSUMS:
        logger.warning(
            "%s is of PyTorch before 1.6 and has no checksums, so that damage would not be noticed",
            path,
        )
    for name, part in tensors.items():
        if fault := soundness.not_finite(part, name):
            raise ValueError(f"{path} cannot be used: {fault}{soundness.beside(path)}")
    say_formats(state["model"], path)
    return state


def updates_of(path: str | os.PathLike) -> int:
    """After how many updates a checkpoint of fairseq's was written; its tensors stay on the disk.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is damaged or no checkpoint of fairseq's.
    """
    soundness.require_file(path)
    damage = soundness.damage(path)
    try:
        if damage is None:
            return soundness.updates_in(path)
    except Exception as error:  # whatever is in the file decides what fails
        damage = loading_fault(error)
    raise ValueError(
        f"{path} is damaged or no checkpoint of fairseq's: {damage}{soundness.beside(path)}"
    )


def load_training(
    trainer: Trainer, filename: str, *arguments: object, **options: object
) -> dict | None:
    """Replace Trainer.load_checkpoint, which begins anew where a file is missing that was asked
    for.

    A task that has `check_resumed` is shown what it kept in the checkpoint, unless that is only
    finetuned from. A training goes on with one Adam from a checkpoint of another.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: as in `load_checkpoint`, or the task refuses.
    """
    asked_for = trainer.cfg.checkpoint.restore_file != LAST
    if asked_for or os.path.lexists(filename):
        soundness.require_file(filename)
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
    """Replace torch_persistent_save; `async_write` is for remote paths, which lsq does not know.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
        FloatingPointError: the model holds NaN or infinity; only crash.pt is written nevertheless.
    """
    if isinstance(content, dict) and os.path.basename(filename) != CRASH:
        if fault := soundness.not_finite(content.get("model")):
            raise FloatingPointError(
                f"{fault}; {filename} is not written, and earlier checkpoints are kept"
            )
    _write_whole(filename, lambda file: torch.save(content, file))


def copy_checkpoint(source: str, target: str, overwrite: bool = False) -> bool:
    """Replace PathManager.copy; returns True.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
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


# fairseq claims a folder by a function of a module and never releases it
_held = contextlib.ExitStack()


def claim_folder(folder: str) -> None:
    """Replace verify_checkpoint_directory, which the first process calls before a training.

    The folder is this process's until `release_folder`, or until the process ends.

    Raises:
        Busy: another training writes there; names the process.
        OSError: the folder cannot be written.
    """
    release_folder()
    _held.enter_context(locked_folder(Path(folder), "choose another --save-dir"))


def release_folder() -> None:
    """Let others write into the folder of `claim_folder`."""
    _held.close()


atexit.register(release_folder)
