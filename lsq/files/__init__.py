"""Files and folders that are written whole or not at all."""

import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""End of the name of a file that is being written."""


def write(path: Path, make: Callable[[BinaryIO], object], *, mark: str = "") -> None:
    """Let `make` write into a temporary file beside `path`, then rename it: all of the new file or
    all of the old stays. OSError if it cannot be written.

    `mark` is part of the temporary name: another for each writer, where several may write this file
    at once. Without, what a killed process left is written over and does not pile up.
    """
    temporary = path.with_name(f".{path.name}{mark}{PARTIAL}")
    try:
        with open_partial(temporary) as file:
            make(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # of a full disk
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_name(path: str | os.PathLike) -> None:
    """Raise a ValueError if a name is not UTF-8, which other libraries cannot open."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the name {path} is not UTF-8, and PyTorch and sentencepiece cannot open it; rename it"
        ) from None


def loading_fault(error: Exception) -> str:
    """Say in a line why torch.load refused a file, without its advice to load whatever is in it."""
    text = str(error)
    unknown = re.search(r"GLOBAL (\S+)", text)
    if unknown is not None:
        return f"it holds a {unknown[1]}, and making one could run any code"
    if "weights_only" in text:
        return "it was not written by torch.save"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"


def write_text(path: Path, text: str) -> None:
    """`write` a UTF-8 file, which others may be writing, too. What is no text, as in names of files
    that are not UTF-8, is escaped: "\\udcff", which JSON reads as it was."""
    content = text.encode(errors="backslashreplace")
    write(path, lambda file: file.write(content), mark=f".{uuid.uuid4().hex}")


def write_folder(path: Path, make: Callable[[Path], object]) -> None:
    """Let `make` write into an empty folder beside `path`, then rename it; a folder that was there
    is replaced. OSError if it cannot be written.

    For an instant between two renames neither is there; of a process that is killed then, the next
    one puts the old folder back. A link to a folder is replaced, and what it names stays.
    """
    new, old = (path.with_name(f".{path.name}.{name}{PARTIAL}") for name in ("new", "old"))
    _put_back(old, path)  # of a killed process
    _remove(new, old)
    new.mkdir()
    try:
        make(new)
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        _put_back(old, path)  # a signal came between the renames, or the second one failed
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
    """Open a file for writing, and empty it if it exists; OSError if it is a link."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb")
