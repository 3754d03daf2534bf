"""Memory on the CPU: arenas, a pool for tensors, and rooms for tensors that live inside one pass.

The C library returns large tensors to the system at once, and the system clears their pages before
it gives them out again: a fifth of a ViT's step. Here pages are kept.
"""

import contextlib
import functools
import math
import mmap
import os
import sys
import threading
import warnings
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from lsq.memory.buffers import DEFAULT_ALIGNMENT, Buffer
from lsq.memory.planner import plan

SMALLEST = 1 << 18
"""Bytes of the smallest tensor that is kept here; the C library itself keeps smaller ones."""
Life = tuple[int, int, int]
"""Bytes, and the first and last operation that needs them."""
HUGE_PAGE = 2 << 20
"""Bytes of the pages that CPU arenas ask for: they cause fewer page faults and TLB misses."""
LINUX = sys.platform == "linux"
NO_RESERVE = 0x4000 if LINUX else 0
"""MAP_NORESERVE: a plan may be larger than the machine's memory, as long as no batch fills it."""
WIPE_ON_FORK = 18
"""MADV_WIPEONFORK."""


class Arena:
    """The bytes of a plan.

    On the CPU they are address space: the system gives memory to a page when it is first written.
    Memory goes back when the arena and all its tensors are gone. `size`: bytes. `wiped_on_fork`: if
    the system can, a forked process finds zeros there, not copies of pages. Raises MemoryError: the
    system refuses so much.
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
        """Return a contiguous, uninitialised tensor at byte `offset`. Raises ValueError: it does
        not fit, or the offset is no multiple of the element size."""
        self._check(offset, shape, dtype)
        return tensor_in(
            self._slab.untyped_storage(), self._slab.storage_offset() + offset, shape, dtype
        )

    def lend(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, weakref.ref]:
        """Return a tensor with its own storage, and a weak reference that dies with it."""
        memory = self.tensor(offset, shape, dtype)  # lives as long as the new storage
        return from_dlpack(to_dlpack(memory)), weakref.ref(memory)

    def release(self, offset: int, size: int) -> None:
        """Give the whole pages in `size` bytes from `offset` on back to the system, on Linux."""
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
    """Return a contiguous, uninitialised tensor at byte `offset` of a storage."""
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
            with contextlib.suppress(OSError):  # an older kernel lacks it
                pages.madvise(advice)
    return pages


class Gaps:
    """The free parts of the bytes [0, size), neighbours joined. `alignment`: bytes, of offsets."""

    def __init__(self, size: int, alignment: int = DEFAULT_ALIGNMENT):
        self._alignment = alignment
        # (start, end), in order; changed in one step, so that an interrupt leaves it whole
        self._gaps = [(0, size // alignment * alignment)]

    def __iter__(self):
        """Iterate over (offset, bytes) of each gap, in order."""
        return iter([(start, end - start) for start, end in self._gaps])

    def take(self, size: int) -> int | None:
        """Take `size` > 0 bytes from the smallest gap that has them (the lowest of equals); return
        the offset, or None if no gap does."""
        size = self._aligned(size)
        fitting = (
            (end - start, number)
            for number, (start, end) in enumerate(self._gaps)
            if end - start >= size
        )
        length, number = min(fitting, default=(0, None))
        if number is None:
            return None
        start, end = self._gaps[number]
        self._gaps[number : number + 1] = [(start + size, end)] if length > size else []
        return start

    def give_back(self, start: int, size: int) -> None:
        end = start + self._aligned(size)
        first = last = bisect_left(self._gaps, (start, end))
        if first and self._gaps[first - 1][1] == start:
            first -= 1
            start = self._gaps[first][0]
        if last < len(self._gaps) and self._gaps[last][0] == end:
            end = self._gaps[last][1]
            last += 1
        self._gaps[first:last] = [(start, end)]

    def _aligned(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment


class Pool:
    """CPU tensors in one arena, whose pages exist once they have been written. `size`: bytes of the
    arena. Raises MemoryError: the system refuses so much address space."""

    def __init__(self, size: int):
        self._arena = Arena(size, wiped_on_fork=False)
        self._gaps = Gaps(size)
        self._borrowed: dict[int, tuple[weakref.ref, int]] = {}  # offset -> memory, bytes
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a contiguous, uninitialised, non-empty tensor; None: there is no room. Its memory
        returns to the pool when nothing uses its storage."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            self._take_back()
            offset = self._gaps.take(size)
        if offset is None:
            return None
        tensor, memory = self._arena.lend(offset, shape, dtype)
        # without the lock: garbage may be collected while this thread holds it
        returned = self._returned
        self._borrowed[offset] = weakref.ref(memory(), lambda _: returned.append(offset)), size
        return tensor

    def release(self) -> None:
        """Give all pages that no tensor uses back to the system."""
        with self._lock:
            self._take_back()
            for offset, size in self._gaps:
                self._arena.release(offset, size)

    def _take_back(self) -> None:
        while self._returned:
            offset = self._returned.popleft()
            _, size = self._borrowed.pop(offset)
            self._gaps.give_back(offset, size)


class Room:
    """Memory for workspaces; one at a time is open, by the thread that holds `lock`.
    `lasting_bytes`: CPU address space to keep, more than any workspace needs; 0: PyTorch's
    allocator gives memory for each use. Raises MemoryError: the system refuses so much."""

    def __init__(self, device: torch.device | str, lasting_bytes: int = 0):
        self.lock = threading.Lock()
        self.device = torch.device(device)
        self.arena = Arena(lasting_bytes) if lasting_bytes else None

    def release(self) -> None:
        if self.arena is not None:
            self.arena.release(0, self.arena.size)


class Workspace:
    """Tensors that share bytes unless their lives overlap. It keeps no values between uses."""

    def __init__(self, room: Room, lives: Sequence[Life]):
        self._offsets, self.size = _planned(tuple(lives))
        self._arena = room.arena
        if self._arena is None:
            self._storage = torch.UntypedStorage(self.size, device=room.device)
            self._address = self._storage.data_ptr()

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the contiguous tensor of this number; call it before the workspace is first
        opened. Outside `opened` it has an address, but perhaps no memory."""
        if self._arena is not None:
            return self._arena.tensor(self._offsets[number], shape, dtype)
        return tensor_in(self._storage, self._offsets[number], shape, dtype)

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """Give the workspace memory within this context; yields whether its address has changed."""
        if self._arena is not None:
            yield False
            return
        self._storage.resize_(self.size)
        before, self._address = self._address, self._storage.data_ptr()
        try:
            yield before != self._address
        finally:
            self._storage.resize_(0)


@functools.lru_cache(maxsize=1024)
def _planned(lives: tuple[Life, ...]) -> tuple[list[int], int]:
    """Return (the offset of each, bytes of all)."""
    buffers = [
        Buffer(name=str(number), size=size, first=first, last=last)
        for number, (size, first, last) in enumerate(lives)
    ]
    result = plan(buffers, method="training")
    return list(result.offsets.values()), result.peak


class _Process:
    """The memory of this process; all layers and threads share it."""

    def __init__(self):
        self.rooms: dict[tuple[torch.device, bool], list[Room]] = {}
        self.unkept: list[None] = []  # an item for each active `nothing_kept`
        self.lending: weakref.WeakSet = weakref.WeakSet()

    @functools.cached_property
    def bytes(self) -> int:
        """The machine's memory; more is never kept."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @functools.cached_property
    def pool(self) -> Pool | None:
        try:
            return Pool(self.bytes)
        except MemoryError:
            warnings.warn(
                "the system limits the address space of this process (ulimit -v), so lsq keeps no"
                " memory between passes, which makes them slower",
                stacklevel=2,
            )
            return None

    def before_fork(self) -> None:
        """Copy out lent tensors that the child may read: it finds zeros in arenas."""
        for memory in list(self.lending):
            memory.copy_out()

    def after_fork(self) -> None:
        """Start anew: another thread may have been inside a room or the pool at the fork."""
        self.rooms.clear()
        vars(self).pop("pool", None)


_process = _Process()
"""A registry, since memory belongs to a process, whichever layer asks, like malloc's."""
os.register_at_fork(before=_process.before_fork, after_in_child=_process.after_fork)


def copied_out_before_forks(memory: object) -> None:
    _process.lending.add(memory)


def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous, uninitialised CPU tensor, in kept memory if it is large."""
    if math.prod(shape) * dtype.itemsize >= SMALLEST and not _process.unkept:
        pool = _process.pool
        kept = None if pool is None else pool.tensor(shape, dtype)
        if kept is not None:
            return kept
    return torch.empty(shape, dtype=dtype, device="cpu")


@contextmanager
def room(device: torch.device) -> Iterator[Room]:
    """Yield a room for the workspace of one pass; nobody else works in it meanwhile."""
    lasting = not _process.unkept and device.type == "cpu" and _process.pool is not None
    rooms = _process.rooms.setdefault((device, lasting), [])
    free = next((each for each in list(rooms) if each.lock.acquire(blocking=False)), None)
    if free is None:
        try:
            free = Room(device, _process.bytes if lasting else 0)
        except MemoryError:  # no address space for one more thread
            free = Room(device)
        free.lock.acquire()
        rooms.append(free)
    try:
        yield free
    finally:
        free.lock.release()


def release() -> None:
    """Give unused memory back to the system, as torch.cuda.empty_cache() does for GPUs."""
    if _process.pool is not None:
        _process.pool.release()
    for each in [each for rooms in list(_process.rooms.values()) for each in list(rooms)]:
        if each.lock.acquire(blocking=False):
            try:
                each.release()
            finally:
                each.lock.release()


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Take all memory from PyTorch within this context and return it at once, so that PyTorch's
    profilers see it. Holds for all threads until the last has left."""
    _process.unkept.append(None)
    try:
        yield
    finally:
        _process.unkept.pop()
