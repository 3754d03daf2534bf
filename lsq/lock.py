"""One writer at a time: locks that fall with the process that holds them, however it ends."""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import platform
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

NAME = ".lsq.lock"
"""The lock of a folder, while it is held."""
_BEGINS = "process "
"""How the text of a lock begins."""
_held: set[int] = set()
"""File descriptors of the locks of this process."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL_SECONDS = 0.05


class Busy(OSError):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, what: str, remedy: str, *, seconds: float = 0.0) -> Iterator[None]:
    """Let nobody else hold the lock `path` within this context.

    The file says who holds it, and is removed at the end. One that a killed process left is taken over.

    Args:
        path: the lock, a file of its own; its folder is made where it is missing.
        what: is locked, for the message: "runs/mine".
        remedy: what else the user can do, for the message: "choose another --output".
        seconds: to wait for the one who holds it.

    Raises:
        Busy: somebody holds it still; names the process.
        OSError: the folder cannot be written, or a file of somebody else, or a link, has the name of the lock.
    """
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    while (file := _take(path)) is None:
        if time.monotonic() >= deadline:
            raise Busy(f"{_holder(path)} is writing into {what}; wait for it, or {remedy}")
        time.sleep(_POLL_SECONDS)
    with file:
        _held.add(file.fileno())
        file.seek(0)
        file.truncate()
        file.write(f"{_BEGINS}{os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S},\n")
        file.flush()
        try:
            yield
        finally:
            _held.discard(file.fileno())
            path.unlink(missing_ok=True)  # before the lock falls: whoever opened it meanwhile looks again
            for folder in made:
                with contextlib.suppress(OSError):  # it holds something
                    folder.rmdir()


def locked_folder(folder: Path, remedy: str, *, seconds: float = 0.0) -> contextlib.AbstractContextManager[None]:
    """`locked` for all that is in a folder."""
    return locked(folder / NAME, str(folder), remedy, seconds=seconds)


def locked_file(path: Path, remedy: str) -> contextlib.AbstractContextManager[None]:
    """`locked` for one file."""
    return locked(path.with_name(path.name + ".lock"), str(path), remedy)


def _take(path: Path) -> TextIO | None:
    """The open lock file, locked; None: somebody else has it."""
    while True:
        # Never through a link: what it points to is somebody's.
        file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+", encoding="utf-8")
        try:
            if file.read(len(_BEGINS)) not in ("", _BEGINS):
                raise FileExistsError(f"{path} is no lock of lsq's and would be written over; move it away")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                _say_unsupported(path.parent, str(error.strerror))
                return file
            file.close()
            raise
        file.close()  # its holder removed it meanwhile


def _forget_in_child() -> None:
    """Processes that this one forks hold nothing: they may live on for a while when it is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


@functools.cache  # once a folder
def _say_unsupported(folder: Path, reason: str) -> None:
    logger.warning("%s cannot be locked (%s): do not let two processes write there at a time", folder, reason)
