"""Memory of the CPU that is kept between passes, and how to give it back.

A training step makes and drops the same tensors again and again. The C library returns large ones
to the system at once, which clears their pages before it gives them out again: a fifth of a ViT's
step. Here pages stay.
"""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lsq.memory.pool import Pool
from lsq.memory.workspace import Room

SMALLEST = 1 << 18
"""Bytes of the smallest tensor that is kept; the C library keeps smaller ones itself."""

# The memory of the process, like malloc's: all layers and threads share it.
_rooms: dict[tuple[torch.device, bool], list[Room]] = {}
_unkept: list[None] = []  # an item for each `nothing_kept` that is active in any thread


@functools.cache
def _machine_bytes() -> int:
    """The machine's memory: more is never kept."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _pool() -> Pool | None:
    try:
        return Pool(_machine_bytes())
    except MemoryError:
        warnings.warn(
            "the system limits the address space of this process (ulimit -v), so lsq keeps no"
            " memory between passes, which makes them slower",
            stacklevel=2,
        )
        return None


def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous, uninitialised tensor of the CPU, in kept memory if it is large."""
    if (
        not _unkept
        and math.prod(shape) * dtype.itemsize >= SMALLEST
        and (pool := _pool()) is not None
    ):
        kept = pool.tensor(shape, dtype)
        if kept is not None:
            return kept
    return torch.empty(shape, dtype=dtype, device="cpu")


@contextmanager
def room(device: torch.device) -> Iterator[Room]:
    """A room for the workspace of one pass; nobody else works in it meanwhile."""
    lasting = not _unkept and device.type == "cpu" and _pool() is not None
    rooms = _rooms.setdefault((device, lasting), [])
    free = next((each for each in list(rooms) if each.lock.acquire(blocking=False)), None)
    if free is None:
        free = _new_room(device, lasting)
        free.lock.acquire()
        rooms.append(free)
    try:
        yield free
    finally:
        free.lock.release()


def _new_room(device: torch.device, lasting: bool) -> Room:
    if lasting:
        with contextlib.suppress(MemoryError):  # one more thread than there is address space for
            return Room(device, _machine_bytes())
    return Room(device)


def release() -> None:
    """Give memory that nothing uses now back to the system: that of steps that will not come again.

    Only memory of the CPU is kept; torch.cuda.empty_cache() does the same for GPUs.
    """
    if (pool := _pool()) is not None:
        pool.release()
    for rooms in list(_rooms.values()):
        for each in list(rooms):
            if each.lock.acquire(blocking=False):
                try:
                    each.release()
                finally:
                    each.lock.release()


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Within this context, all memory comes from PyTorch and goes back at once, so that its
    profilers see everything. That holds for all threads until the last one has left."""
    _unkept.append(None)
    try:
        yield
    finally:
        _unkept.pop()


def _after_fork() -> None:
    """Another thread may have been in the middle of something."""
    _pool.cache_clear()
    _rooms.clear()


os.register_at_fork(after_in_child=_after_fork)
