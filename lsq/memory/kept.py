"""What is kept of the CPU's memory between passes, and how to give it back.

A training step makes and drops the same tensors again and again. The C library returns large ones
to the system at
once, which clears their pages before it gives them out again: a fifth of a ViT's step. Here pages
    stay.
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
from lsq.memory.workspace import LastingRoom, PassingRoom, Room

SMALLEST = 1 << 18
"""Bytes of a tensor that is kept; the C library keeps smaller ones itself."""

_seen_through: list[None] = []
"""As long as there is something in it, nothing is kept: one entry for each `nothing_kept` that
somebody is in."""
_rooms: dict[tuple[torch.device, bool], list[Room]] = {}


@functools.cache
def _machine() -> int:
    """Bytes of the machine's memory: more is never kept."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _pool() -> Pool | None:
    try:
        return Pool(_machine())
    except MemoryError:
        warnings.warn(
            "the system limits the address space of this process (ulimit -v), so lsq keeps no"
            " memory between passes, "
            "which makes them slower",
            stacklevel=2,
        )
        return None


def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU with whatever values, in kept memory if it is large."""
    if (
        not _seen_through
        and math.prod(shape) * dtype.itemsize >= SMALLEST
        and (pool := _pool()) is not None
    ):
        found = pool.tensor(shape, dtype)
        if found is not None:
            return found
    return torch.empty(shape, dtype=dtype, device="cpu")


@contextmanager
def room(device: torch.device) -> Iterator[Room]:
    """A room for the workspace of one pass; nobody else works in it meanwhile."""
    lasting = not _seen_through and device.type == "cpu" and _pool() is not None
    rooms = _rooms.setdefault((device, lasting), [])
    found = next((one for one in list(rooms) if one.lock.acquire(blocking=False)), None)
    if found is None:
        found = _new_room(device, lasting)
        found.lock.acquire()
        rooms.append(found)
    try:
        yield found
    finally:
        found.lock.release()


def _new_room(device: torch.device, lasting: bool) -> Room:
    if lasting:
        with contextlib.suppress(MemoryError):  # one more thread than there is address space for
            return LastingRoom(_machine())
    return PassingRoom(device)


def release() -> None:
    """Give memory that nothing uses now back to the system: that of steps that will not come again.

    Only memory of the CPU is kept; torch.cuda.empty_cache() does the same for GPUs.
    """
    if (pool := _pool()) is not None:
        pool.release()
    for rooms in list(_rooms.values()):
        for one in list(rooms):
            if one.lock.acquire(blocking=False):
                try:
                    one.release()
                finally:
                    one.lock.release()


@contextmanager
def nothing_kept() -> Iterator[None]:
    """In it, all memory comes from PyTorch and goes back at once, so that its profilers see
    everything.

    That holds for all threads until the last one has left.
    """
    _seen_through.append(None)
    try:
        yield
    finally:
        _seen_through.pop()


def _in_a_forked_process() -> None:
    """Another thread may have been in the middle of something."""
    _pool.cache_clear()
    _rooms.clear()


os.register_at_fork(after_in_child=_in_a_forked_process)
