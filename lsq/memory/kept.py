"""Memory of the CPU: arenas, a pool for tensors, rooms for what lives inside one pass.

The C library returns large tensors to the system at once, which clears their pages before it gives
them out again: a fifth of a ViT's step. Here pages stay.
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
"""Bytes of the smallest tensor that is kept; the C library keeps smaller ones itself."""
Life = tuple[int, int, int]
"""Bytes, and the first and last operation that needs them."""
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

    `size`: bytes. `device`: its device. `wiped_on_fork`: a forked process finds zeros there, not
    copies of pages, if the system can. Raises MemoryError: the system refuses so much.
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
        """A contiguous, uninitialised tensor at byte `offset`. Raises ValueError: it does not fit,
        or the offset is no multiple of the element's size."""
        self._check(offset, shape, dtype)
        return tensor_in(
            self._slab.untyped_storage(), self._slab.storage_offset() + offset, shape, dtype
        )

    def lend(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, weakref.ref]:
        """A tensor with a storage of its own, and a reference that dies with that storage."""
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


class Gaps:
    """The free parts of the bytes [0, size), neighbours joined; `alignment`: of offsets."""

    def __init__(self, size: int, alignment: int = DEFAULT_ALIGNMENT):
        self._alignment = alignment
        # (start, end) in order; changed in one step, whatever interrupts
        self._gaps = [(0, size // alignment * alignment)]

    def __iter__(self):
        """(offset, bytes) of each, in order."""
        return iter([(start, end - start) for start, end in self._gaps])

    def take(self, size: int) -> int | None:
        """The offset of `size` > 0 bytes in the smallest gap that has them, the lowest of these, if
        any."""
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
    """Tensors of the CPU in one arena, whose pages exist once they have been written.

    `size`: bytes of the arena. Raises MemoryError: the system has not so much address space for
    this process.
    """

    def __init__(self, size: int):
        self._arena = Arena(size, wiped_on_fork=False)
        self._gaps = Gaps(size)
        self._borrowed: dict[int, tuple[weakref.ref, int]] = {}  # offset -> memory, bytes
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A contiguous, uninitialised tensor, not empty, whose memory is taken back once nothing
        uses its storage; None: there is no room."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            self._take_back()
            offset = self._gaps.take(size)
        if offset is None:
            return None
        tensor, memory = self._arena.lend(offset, shape, dtype)
        # without the lock: garbage is collected anywhere, under the lock as well
        returned = self._returned
        self._borrowed[offset] = weakref.ref(memory(), lambda _: returned.append(offset)), size
        return tensor

    def release(self) -> None:
        """Give every page without a tensor back to the system."""
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
    """Memory for workspaces, of which one is open at a time, by whoever holds `lock`.
    `lasting_bytes`: address space of the CPU that stays, more than any workspace needs; 0:
    PyTorch's allocator gives memory for each use. Raises MemoryError: the system has not so much
    address space."""

    def __init__(self, device: torch.device | str, lasting_bytes: int = 0):
        self.lock = threading.Lock()
        self.device = torch.device(device)
        self.arena = Arena(lasting_bytes) if lasting_bytes else None

    def release(self) -> None:
        if self.arena is not None:
            self.arena.release(0, self.arena.size)


class Workspace:
    """Tensors that share bytes unless they are needed together, and hold nothing between uses."""

    def __init__(self, room: Room, lives: Sequence[Life]):
        self._offsets, self.size = _planned(tuple(lives))
        self._arena = room.arena
        if self._arena is None:
            self._storage = torch.UntypedStorage(self.size, device=room.device)
            self._address = self._storage.data_ptr()

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The contiguous tensor of that number, made before the workspace is first opened. Outside
        `opened` it has an address, but perhaps no bytes."""
        if self._arena is not None:
            return self._arena.tensor(self._offsets[number], shape, dtype)
        return tensor_in(self._storage, self._offsets[number], shape, dtype)

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """A context for work in it; True if its address differs from the last time."""
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
    """(the offset of each, bytes of all)."""
    buffers = [
        Buffer(name=str(number), size=size, first=first, last=last)
        for number, (size, first, last) in enumerate(lives)
    ]
    result = plan(buffers, method="training")
    return list(result.offsets.values()), result.peak


class _Process:
    """The memory of this process, like malloc's: all layers and threads share it."""

    def __init__(self):
        self.rooms: dict[tuple[torch.device, bool], list[Room]] = {}
        self.unkept: list[None] = []  # an item for each active `nothing_kept`
        self.lending: weakref.WeakSet = weakref.WeakSet()

    @functools.cached_property
    def bytes(self) -> int:
        """The machine's memory: more is never kept."""
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
        """Arenas are zeros in a forked process: tensors that it may read are moved."""
        for memory in list(self.lending):
            memory.copy_out()

    def after_fork(self) -> None:
        """Another thread may have been in the middle of something."""
        self.rooms.clear()
        vars(self).pop("pool", None)


_process = _Process()
"""A registry, since memory belongs to a process as malloc's does, whichever layer asks."""
os.register_at_fork(before=_process.before_fork, after_in_child=_process.after_fork)


def copied_out_before_forks(memory: object) -> None:
    _process.lending.add(memory)


def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous, uninitialised tensor of the CPU, in kept memory if it is large."""
    if math.prod(shape) * dtype.itemsize >= SMALLEST and not _process.unkept:
        pool = _process.pool
        kept = None if pool is None else pool.tensor(shape, dtype)
        if kept is not None:
            return kept
    return torch.empty(shape, dtype=dtype, device="cpu")


@contextmanager
def room(device: torch.device) -> Iterator[Room]:
    """A room for the workspace of one pass; nobody else works in it meanwhile."""
    lasting = not _process.unkept and device.type == "cpu" and _process.pool is not None
    rooms = _process.rooms.setdefault((device, lasting), [])
    free = next((each for each in list(rooms) if each.lock.acquire(blocking=False)), None)
    if free is None:
        try:
            free = Room(device, _process.bytes if lasting else 0)
        except MemoryError:  # one more thread than there is address space
            free = Room(device)
        free.lock.acquire()
        rooms.append(free)
    try:
        yield free
    finally:
        free.lock.release()


def release() -> None:
    """Give memory that nothing uses now back to the system. torch.cuda.empty_cache() does the same
    for GPUs."""
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
    """Within this context all memory comes from PyTorch and goes back at once, so that its
    profilers see everything; for all threads until the last one has left."""
    _process.unkept.append(None)
    try:
        yield
    finally:
        _process.unkept.pop()
