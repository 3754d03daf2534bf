"""Memory in a file without a name: the system writes it to the disk and reads it by itself."""

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from lsq.memory.buffers import DEFAULT_ALIGNMENT


class Scratch:
    """`size` bytes in a file in `folder`; the file ends with its last tensor, or the process.

    Pages count as the system's cache: it writes those that were not used for long to the disk when
    other memory is needed. Raises OSError: the folder cannot be written, or its disk has no room.
    """

    def __init__(self, folder: str | os.PathLike, size: int):
        try:
            with tempfile.TemporaryFile(dir=Path(folder)) as file:
                # a sparse file would kill the process when the disk is full
                os.posix_fallocate(file.fileno(), 0, size)
                self._pages = mmap.mmap(file.fileno(), size)
        except OSError as error:
            text = f"{error.strerror}, for {size} bytes of memory; name another folder"
            raise OSError(error.errno, text, str(folder)) from error
        self._end = 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor, of zeros, with a storage of its own."""
        count, offset = math.prod(shape), self._end
        self._end = room(offset + count * dtype.itemsize)
        return torch.frombuffer(self._pages, dtype=dtype, count=count, offset=offset).view(shape)

    @property
    def end(self) -> int:
        """Bytes in use."""
        return self._end

    def prefetch(self, first: int, last: int) -> None:
        """Read bytes `first` to `last` (excluded) from the disk in the background."""
        first = first // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_WILLNEED, first, last - first)


def room(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes."""
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
