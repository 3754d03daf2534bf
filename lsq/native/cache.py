"""Compiled code on disk: files in the user's cache folder, written whole or not at all, each with a
checksum.

The folder is lsq/<kind> in $XDG_CACHE_HOME, by default in ~/.cache.
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
    """Return the folder for files of this kind ("kernels", "emulator"); it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lsq" / kind


def digest(*parts: str | bytes) -> str:
    """Return a name for content that depends on `parts` alone."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def load(path: Path) -> bytes | None:
    """Return the content that `store` wrote; None: there is none, or it is damaged (a warning)."""
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
    """Write a file with its checksum. Return False, with one warning, if that fails."""
    try:
        write(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        _say_unwritable(path.parent, str(error.strerror))
        return False
    return True


def write(path: Path, content: bytes) -> None:
    """Write a file in one step: other processes see all of it or nothing."""
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
