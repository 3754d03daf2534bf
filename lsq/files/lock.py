"""Locks for one writer at a time, which end with the process that holds them, however it ends."""

import contextlib
import errno
import functools
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

NAME = ".lsq.lock"
"""Name of the lock file of a folder; it exists while the lock is held."""
_BEGINS = "process "
"""Beginning of the text in a lock."""
_PAUSE = 0.05
"""Seconds between two attempts to take the lock."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Busy(OSError):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, what: str, remedy: str, *, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock `path` within this context. The file names this process and is removed at the
    end; a lock that a killed process left is taken over.

    Args:
        path: the lock file, used for nothing else; a missing folder is made.
        what: what is locked, for the message: "runs/mine".
        remedy: what else the user can do, for the message: "choose another --output".
        seconds: how long to wait for another process.

    Raises:
        Busy: another process still holds the lock; the message names it.
        OSError: the name is taken by a link or a file that is no lock, or the folder cannot be
            written.
    """
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    lock, since, taken = FileLock(path, timeout=0, fallback_to_soft=False), time.monotonic(), False
    try:
        while not taken:
            with _uninterrupted():
                taken = _take(lock, path)
            if not taken and time.monotonic() - since >= seconds:
                raise Busy(f"{_text(path)} is writing into {what}; wait for it, or {remedy}")
            if not taken:
                time.sleep(_PAUSE)
        since = f"since {datetime.now():%Y-%m-%d %H:%M:%S}"
        _write(path, f"{_BEGINS}{os.getpid()} on {platform.node()}, {since},\n")
        yield
    finally:
        with _uninterrupted():
            if taken:
                # before the lock is released: a process that opened the file meanwhile tries again
                path.unlink(missing_ok=True)
            lock.release()
            for folder in made:
                with contextlib.suppress(OSError):  # the folder is not empty
                    folder.rmdir()


def _take(lock: FileLock, path: Path) -> bool:
    """Try to take the lock; return True as well if the file system has no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not _text(path).startswith(("another", _BEGINS)):
        raise FileExistsError(f"{path} is no lock of lsq's and would be written over; move it away")
    try:
        lock.acquire()
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _say_unsupported(path.parent, str(error.strerror))
    return True


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals that Python handles, such as Ctrl-C, to the end of this context, so that no
    lock is half taken or released."""
    came: list[int] = []
    held = True

    def note(number: int, frame: object) -> None:
        if held:
            came.append(number)
        else:  # the signal came before its own handler was put back
            handlers[number](number, frame)

    # other threads get no signals
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        held = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def locked_folder(
    folder: Path, remedy: str, *, seconds: float = 0.0
) -> contextlib.AbstractContextManager[None]:
    """Lock everything in a folder; see `locked`."""
    return locked(folder / NAME, str(folder), remedy, seconds=seconds)


def locked_file(path: Path, remedy: str) -> contextlib.AbstractContextManager[None]:
    """Lock one file; see `locked`."""
    return locked(path.with_name(path.name + ".lock"), str(path), remedy)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _text(path: Path) -> str:
    """Return the text of a lock, which says who holds it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"


@functools.cache  # once for each folder
def _say_unsupported(folder: Path, reason: str) -> None:
    logger.warning(
        "%s cannot be locked (%s): do not let two processes write there at a time", folder, reason
    )
