"""The arena: the memory of a plan, allocated once, with tensors as views at planned addresses."""

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

HUGE_PAGE = 2 << 20
"""Bytes of the pages that arenas of the CPU ask for: fewer page faults and address cache misses."""
LINUX = sys.platform == "linux"
NO_RESERVE = 0x4000 if LINUX else 0
"""MAP_NORESERVE: a plan may be larger than the machine's memory, if no batch is."""
WIPE_ON_FORK = 18
"""MADV_WIPEONFORK."""


class Arena:
    """The bytes of a plan.

    On the CPU they are untouched address space: the system gives memory to the pages that are
    written, once. It is given back when the arena and every tensor in it are gone.

    Args:
        size: bytes.
        device: its device.
        wiped_on_fork: a forked process finds zeros there, not copies of pages, if the system can.

    Raises:
        MemoryError: the system refuses so much.
    """

    def __init__(
        self, size: int, device: torch.device | str = "cpu", *, wiped_on_fork: bool = True
    ):
        self.size = size
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self._pages = _pages(size, wiped_on_fork=wiped_on_fork)
            whole = torch.frombuffer(self._pages, dtype=torch.uint8)
            self._start = -whole.data_ptr() % HUGE_PAGE
            self._slab = whole[self._start : self._start + size]
        else:
            self._pages, self._slab = None, torch.empty(size, dtype=torch.uint8, device=self.device)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialised tensor at byte `offset`.

        Raises:
            ValueError: it does not fit, or the offset is no multiple of the element's size.
        """
        self._check(offset, shape, dtype)
        return tensor_in(
            self._slab.untyped_storage(), self._slab.storage_offset() + offset, shape, dtype
        )

    def lend(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, weakref.ref]:
        """A tensor as `tensor`, with a storage of its own; the reference is dead once nothing uses
        that storage."""
        memory = self.tensor(offset, shape, dtype)  # lives on as long as the storage made of it
        return from_dlpack(to_dlpack(memory)), weakref.ref(memory)

    def release(self, offset: int, size: int) -> None:
        """Give whole pages of `size` bytes from `offset` on back to the system, on Linux."""
        if self._pages is None or not LINUX:
            return
        first = -(-(self._start + offset) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self._start + offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _check(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.size or offset % dtype.itemsize:
            raise ValueError(
                f"a tensor {dtype} {tuple(shape)} of {size} bytes at offset {offset} does not fit"
                f" an arena of {self.size} bytes"
            )


def tensor_in(
    storage: torch.UntypedStorage, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A contiguous, uninitialised tensor at byte `offset` of a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, offset // dtype.itemsize, tuple(shape), _strides(shape)
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _pages(capacity: int, *, wiped_on_fork: bool) -> mmap.mmap:
    """Address space of the CPU in which `capacity` bytes can begin at a multiple of HUGE_PAGE."""
    try:
        pages = mmap.mmap(
            -1, capacity + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        )
    except OSError as error:
        raise MemoryError(
            f"the system gives no address space for a plan of {capacity} bytes ({error.strerror});"
            " plan for smaller batches or shorter sentences, or train without a plan"
        ) from error
    if LINUX:
        for advice in (mmap.MADV_HUGEPAGE, *([WIPE_ON_FORK] if wiped_on_fork else [])):
            with contextlib.suppress(OSError):  # an older kernel does without
                pages.madvise(advice)
    return pages
