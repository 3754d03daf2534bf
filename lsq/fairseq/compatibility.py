"""What fairseq 0.12 needs to work with this PyTorch, on machines without a GPU and on full disks.

Importing this module prepares fairseq once for the whole process:

* checkpoints: the types that fairseq puts into its own are registered as safe for torch.load, which stays as strict
  as it is by default about all others;
* data parallel training on the CPU: fairseq names a device for every module, which PyTorch accepts for GPUs only;
* files that are no checkpoints of fairseq's are named;
* resuming on another number of processes: fairseq would skip or repeat data, or refuse;
* batches: a sentence beyond --max-tokens is named, and so is a data set of which nothing is left;
* writing checkpoints: under another name first, then renamed. fairseq does so for the first file of a save but copies
  checkpoint_best.pt and checkpoint_last.pt over the previous ones, which are lost when the disk is full.
"""

import argparse
import contextlib
import logging
import os
import pickle
import shutil
import typing
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import fairseq.distributed.utils
import fairseq.models.distributed_fairseq_model
import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.file_io import PathManager
from numpy._core import multiarray
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)

_fairseq_load = checkpoint_utils.load_checkpoint_to_cpu
_fairseq_save = checkpoint_utils.torch_persistent_save
_fairseq_copy = PathManager.copy
_fairseq_batches = data_utils.batch_by_size
_fairseq_iterator_state = EpochBatchIterator.state_dict
_fairseq_load_iterator_state = EpochBatchIterator.load_state_dict
_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref] = weakref.WeakKeyDictionary()
NUMPY_DTYPES = ("bool", "int32", "int64", "float32", "float64")


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; whatever stood under its name before is untouched."""


class CPUSafeDataParallel(DistributedDataParallel):
    """DistributedDataParallel that ignores the device which fairseq names for modules on the CPU."""

    def __init__(self, module: torch.nn.Module, device_ids=None, output_device=None, **options):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids=device_ids, output_device=output_device, **options)
        _wrapped[module] = weakref.ref(self)

    @classmethod
    def around(cls, module: torch.nn.Module) -> "CPUSafeDataParallel | None":
        """The data parallel module that was last made of `module`; None: there is none."""
        return _wrapped.get(module, lambda: None)()


def iterator_state(iterator: EpochBatchIterator) -> dict:
    """Takes the place of EpochBatchIterator.state_dict: among how many processes the batches were divided is kept."""
    return {**_fairseq_iterator_state(iterator), "num_shards": iterator.num_shards}


def load_iterator_state(iterator: EpochBatchIterator, state: dict) -> None:
    """Takes the place of EpochBatchIterator.load_state_dict.

    fairseq counts the batches of one process. With another number of processes the same count is another place in the
    epoch: batches would be skipped or repeated, and past the end fairseq refuses. Here no batch is skipped, and fewer
    are repeated than there are processes.
    """
    before, done = state.get("num_shards", iterator.num_shards), state.get("iterations_in_epoch", 0)
    if before != iterator.num_shards:
        state = {**state, "iterations_in_epoch": done * before // iterator.num_shards}
        logger.info(
            "the checkpoint is of %d processes, and now there are %d: of epoch %d, %d batches are done",
            before, iterator.num_shards, state["epoch"], state["iterations_in_epoch"] * iterator.num_shards,
        )
    _fairseq_load_iterator_state(iterator, state)


def load_checkpoint(path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False) -> dict:
    """Takes the place of fairseq's load_checkpoint_to_cpu.

    Raises:
        ValueError: the file is not a checkpoint of fairseq's, or holds types that are not safe to load.
    """
    try:
        return _fairseq_load(path, arg_overrides, load_on_all_ranks)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is not a checkpoint of fairseq's ({_first_line(error)})") from error


def save_checkpoint(content: object, filename: str, async_write: bool = False) -> None:
    """Takes the place of fairseq's torch_persistent_save; `async_write` is for remote paths only.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
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
    temporary = Path(f"{filename}.tmp")
    try:
        with temporary.open("wb") as file:
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


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _refusal(error: BaseException | None) -> OSError | None:
    """What the file system said: torch.save hides it behind a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def batch_by_size(indices, num_tokens_fn, num_tokens_vec=None, max_tokens=None, **options):
    """Takes the place of fairseq's data_utils.batch_by_size, which groups the sentences `indices` into batches.

    Raises:
        ValueError: there are none, or one of them alone is beyond `max_tokens`.
    """
    if len(indices) == 0:
        raise ValueError("no sentence is left to make batches of; all are longer than --max-tokens or the model allow")
    if max_tokens is not None:
        sizes = [num_tokens_fn(index) for index in indices] if num_tokens_vec is None else num_tokens_vec
        longest = int(numpy.argmax(sizes))
        if sizes[longest] > max_tokens:
            raise ValueError(
                f"sentence {indices[longest]} has {sizes[longest]} tokens, but a batch has at most {max_tokens};"
                " raise --max-tokens (--max-tokens-valid where it validates), or leave out sentences that long"
            )
    return _fairseq_batches(indices, num_tokens_fn, num_tokens_vec, max_tokens, **options)


@contextlib.contextmanager
def replaced(module: object, **attributes: object) -> Iterator[None]:
    """Within this context these attributes of a module are others: where fairseq has no hook of its own."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _safe_globals() -> list:
    """Types in fairseq's checkpoints, on disk and as the first process sends them to the others."""
    of_numpy = [numpy.ndarray, numpy.dtype, multiarray._reconstruct, multiarray.scalar]
    of_numpy += [type(numpy.dtype(name)) for name in NUMPY_DTYPES]
    of_omegaconf = [omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.base.ContainerMetadata]
    of_omegaconf += [omegaconf.base.Metadata, omegaconf.nodes.AnyNode, typing.Any, defaultdict, dict, list, int]
    return [argparse.Namespace, *of_numpy, *of_omegaconf, fairseq.distributed.utils._TensorPlaceholder]


def apply() -> None:
    """Prepare fairseq; calling it again changes nothing."""
    torch.serialization.add_safe_globals(_safe_globals())
    fairseq.models.distributed_fairseq_model.DistributedDataParallel = CPUSafeDataParallel
    data_utils.batch_by_size = batch_by_size
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint
    checkpoint_utils.torch_persistent_save = save_checkpoint
    PathManager.copy = staticmethod(copy_checkpoint)
    EpochBatchIterator.state_dict = iterator_state
    EpochBatchIterator.load_state_dict = load_iterator_state


apply()
