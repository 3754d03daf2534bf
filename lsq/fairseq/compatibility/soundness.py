"""Checks that a checkpoint is undamaged, and that its numbers are numbers.

PyTorch writes a CRC-32 with every record of a file and never reads it. Reading them takes half a
second for a gigabyte.
"""

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
            text = str(error)[:200] or type(error).__name__
            return f"its table of contents is unreadable: {text}"
    return None if bad is None else f"the checksum of its record {bad!r} does not fit"


def _plain(record: zipfile.ZipInfo) -> bool:
    """Whether a record is neither packed nor a folder; PyTorch would read nothing at all of one."""
    stored = record.compress_type == zipfile.ZIP_STORED and record.file_size == record.compress_size
    return stored and not record.external_attr & 0x10


def newest_sound(path: str | Path) -> Path | None:
    """The other checkpoint in the folder of `path` of the most updates whose checksums all fit, the
    last written one. Files that do not say their updates come after all others."""
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
    """After how many updates a sound checkpoint of fairseq's was written; its tensors stay on the
    disk.

    Raises:
        Exception: it is no checkpoint of fairseq's; whatever is in the file decides what fails.
    """
    state = torch.load(path, map_location="cpu", mmap=True)
    return int(state["optimizer_history"][-1]["num_updates"])


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
