"""Files and folders that are written whole or not at all."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""Suffix of a file or folder that is being written."""


def write(path: Path, make: Callable[[BinaryIO], object], *, mark: str = "") -> None:
    """Write a file whole or not at all: `make` writes a temporary file beside `path`, which is then
    renamed. Raises OSError: it cannot be written.

    `mark`: part of the temporary name. Writers that may write `path` at the same time need
    different marks. Without a mark, the next writer overwrites what a killed process left, so that
    nothing piles up.
    """
    temporary = path.with_name(f".{path.name}{mark}{PARTIAL}")
    try:
        with open_partial(temporary) as file:
            make(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_name(path: str | os.PathLike) -> None:
    """Raise ValueError if a name is not UTF-8, since other libraries cannot open such a file."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the name {path} is not UTF-8, and PyTorch and sentencepiece cannot open it; rename it"
        ) from None


def loading_fault(error: Exception) -> str:
    """Say in a line why torch.load refused a file, without its advice to load it anyway."""
    text = str(error)
    unknown = re.search(r"GLOBAL (\S+)", text)
    if unknown is not None:
        return f"it holds a {unknown[1]}, and making one could run any code"
    if "weights_only" in text:
        return "it was not written by torch.save"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file as `write` does, safely beside other writers. Characters that UTF-8 cannot
    hold (from file names that are not UTF-8) are escaped: "\\udcff", which JSON reads back."""
    content = text.encode(errors="backslashreplace")
    write(path, lambda file: file.write(content), mark=f".{uuid.uuid4().hex}")


def write_folder(path: Path, make: Callable[[Path], object]) -> None:
    """Let `make` write an empty folder beside `path`, then put it in the place of `path`. Raises
    OSError: it cannot be written, or `path` is a file.

    Between the two renames there is no `path` for an instant. If the process is killed then, the
    next writer puts the old folder back. A link is replaced, and the folder that it names stays.
    """
    if path.is_file():
        text = "this is a file, and a folder would take its place; name another"
        raise NotADirectoryError(errno.ENOTDIR, text, str(path))
    new, old = (path.with_name(f".{path.name}.{name}{PARTIAL}") for name in ("new", "old"))
    _put_back(old, path)  # that a killed process left
    _remove(new, old)
    new.mkdir()
    try:
        make(new)
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        _put_back(old, path)  # if a signal came between the renames, or the second failed
        _remove(new, old)


def _put_back(old: Path, path: Path) -> None:
    if old.exists() and not path.exists():
        old.rename(path)


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def open_partial(path: Path) -> BinaryIO:
    """Open a file for writing, emptied if it exists. Raises OSError: it is a link or unwritable."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb")
