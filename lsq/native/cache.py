"""Compiled code kept on disk: files in the user's cache folder, whole or absent, each with a
checksum of its content.

The folder is lsq/<kind> in $XDG_CACHE_HOME, or in ~/.cache where that is not set.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def folder(kind: str) -> Path:
    """The folder of files of a kind ("kernels", "emulator"); it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lsq" / kind


def digest(*parts: str | bytes) -> str:
    """A name for content that was made from `parts` and from nothing else."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def load(path: Path) -> bytes | None:
    """The content that `store` wrote; None where there is none or it was damaged (said once)."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != checksum:
        logger.warning("%s is damaged; it is made again", path)
        return None
    return content


def store(path: Path, content: bytes) -> bool:
    """Write `content` in one step; False, said once, where the folder cannot be written."""
    try:
        write(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        _say_unwritable(path.parent, str(error.strerror))
        return False
    return True


def write(path: Path, content: bytes) -> None:
    """Write a file in one step: other processes see nothing of it, or all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, staged = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(staged, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise


@functools.cache
def _say_unwritable(place: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s) and are compiled again in every process; make"
        " it writable, or name another folder in XDG_CACHE_HOME",
        place,
        reason,
    )
