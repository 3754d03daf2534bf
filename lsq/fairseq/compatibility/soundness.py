"""Whether a checkpoint is as it was written, its parts are what fairseq's code takes for granted,
and its numbers are numbers.

PyTorch writes a CRC-32 with every record of a file and never reads it. Reading them takes half a
second for a gigabyte.
"""

import argparse
import os
import types
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import omegaconf
import torch
from torch import Tensor

from lsq.files import check_name

NO_CHECKSUMS = "it has no checksums"


def damage(path: str | Path) -> str | None:
    """Check a file of torch.save by its checksums.

    Returns:
        None if they all fit; NO_CHECKSUMS for what is no zip file, as before PyTorch 1.6; else what
        is wrong.

    Raises:
        OSError: it cannot be read.
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
        except Exception as error:  # zipfile trusts the fields of its headers
            return (
                f"its table of contents is unreadable: {str(error)[:200] or type(error).__name__}"
            )
    return None if bad is None else f"the checksum of its record {bad!r} does not fit"


def _plain(record: zipfile.ZipInfo) -> bool:
    """Neither packed nor a folder, of which PyTorch would read nothing at all."""
    stored = record.compress_type == zipfile.ZIP_STORED and record.file_size == record.compress_size
    return stored and not record.external_attr & 0x10


def newest_sound(path: str | Path) -> Path | None:
    """The other checkpoint in the folder of `path` of the most updates whose checksums all fit, the
    last written one.

    Files that do not say their updates come after all others: a clock may go backward.
    """
    folder = Path(path).absolute().parent
    others = [
        file
        for file in folder.glob("checkpoint*.pt")
        if file.is_file() and file.name != Path(path).name
    ]
    sound = (file for file in others if damage(file) is None)
    return max(sound, key=lambda file: (_updates_said(file), file.stat().st_mtime), default=None)


def updates_in(path: str | Path) -> int:
    """After how many updates a sound checkpoint of fairseq's was written; its tensors stay on the
    disk.

    Raises:
        Exception: it is no checkpoint of fairseq's; whatever is in the file decides what fails.
    """
    return int(
        torch.load(path, map_location="cpu", mmap=True)["optimizer_history"][-1]["num_updates"]
    )


def _updates_said(path: Path) -> int:
    """-1 where it does not."""
    try:
        return updates_in(path)
    except Exception:  # see updates_in
        return -1


def beside(path: str | Path) -> str:
    """The end of a message about a file that cannot be used: what can be, if anything."""
    other = newest_sound(path)
    if other is None:
        return ""
    return (
        f"; the newest sound checkpoint beside it is {other.name}: give that one, or copy it"
        " over this one"
    )


def not_finite(state: object, name: str = "") -> str | None:
    """Which tensor in nested mappings and sequences is the first that holds NaN or infinity; None:
    none does."""
    for full_name, tensor in tensors(state, name):
        # a sum shows both; it may also overflow, so that it is no proof
        if tensor.is_floating_point() and not tensor.sum().isfinite():
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            if count:
                return (
                    f"{full_name} holds {count} values of {tensor.numel()} that are NaN or infinite"
                )
    return None


def tensors(state: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of everything in nested mappings and sequences."""
    if isinstance(state, Tensor):
        yield name, state.detach()
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        for index, value in enumerate(state):
            yield from tensors(value, f"{name}.{index}" if name else str(index))


def require_file(path: str | Path) -> None:
    """Refuse what fairseq would take for no checkpoint at all, or end on in the middle.

    Raises:
        IsADirectoryError: it is a folder.
        FileNotFoundError: there is nothing, or a link to nothing.
        ValueError: its name is not UTF-8.
    """
    check_name(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; give one of the checkpoints in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no checkpoint {path}{beside(path)}")


PARTS = {
    "args": (argparse.Namespace, types.NoneType),
    "cfg": (dict, omegaconf.DictConfig, types.NoneType),
    "model": dict,
    "optimizer_history": list,
    "extra_state": dict,
    "task_state": (dict, types.NoneType),
    "last_optimizer_state": (dict, types.NoneType),
}
"""Part of a checkpoint -> its type or types."""
NUMBERS = {"params", "lr", "betas", "eps", "weight_decay", "momentum"}
"""Settings of optimizers that are numbers; those of other optimizers than fairseq's may be
anything."""
SEVERAL = {"params", "betas", "eps"}
"""Settings that may be several numbers."""
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Adam's state of each parameter."""
LARGEST_COUNT = 2**40
"""Largest count of updates and epochs: beyond any training."""


def check_parts(state: dict) -> None:
    """Look at the types, shapes and counts in a checkpoint.

    Raises:
        TypeError, ValueError: one of them is not as fairseq writes it; names it.
    """
    for name, kind in PARTS.items():
        if name in state and not isinstance(state[name], kind):
            raise TypeError(f"{name} is of type {type(state[name]).__name__}")
    for name, tensor in state["model"].items():
        # PyTorch's own exception
        if not isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
            raise TypeError(f"{name} is of type {type(tensor).__name__} and no tensor")
    optimizer = state.get("last_optimizer_state") or {}
    for name, tensor in tensors({"model": state["model"], "optimizer": optimizer}, ""):
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} is a sparse tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} has fewer values than its shape {list(tensor.shape)}")
    place = state.get("extra_state", {}).get("train_iterator", {})
    counts = [(name, place[name]) for name in ("epoch", "iterations_in_epoch") if name in place]
    history = state.get("optimizer_history", [])
    counts += [("num_updates", each["num_updates"]) for each in history if "num_updates" in each]
    for name, count in counts:
        if type(count) is not int or not 0 <= count <= LARGEST_COUNT:
            raise ValueError(f"{name} is {str(count)[:40]}")
    _check_optimizer(optimizer)


def _check_optimizer(optimizer: dict) -> None:
    for number, moments in optimizer.get("state", {}).items():
        shapes = {getattr(moments[name], "shape", None) for name in MOMENTS if name in moments}
        if None in shapes or len(shapes) > 1:
            raise ValueError(
                f"the moments of parameter {number} have other types or shapes than one another"
            )
    for group in optimizer.get("param_groups", []):
        for name in NUMBERS & group.keys():
            value = group[name]
            numbers = value if name in SEVERAL and isinstance(value, (list, tuple)) else [value]
            largest = 1 if name == "betas" else 1e6  # beyond them Python cannot compute with floats
            if not all(_is_number(number, largest) for number in numbers):
                raise ValueError(f"{name} of the optimizer is {str(value)[:40]}")


def _is_number(value: object, largest: float) -> bool:
    """Whether a setting may stay as it is: a number up to `largest`, a tensor or None."""
    if isinstance(value, (int, float)):
        return abs(value) <= largest
    return value is None or isinstance(value, torch.Tensor)
