"""Memory for tensors that come and go: the next step takes what the last one gave back."""

import math
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

import torch

from lsq.memory.arena import Arena
from lsq.memory.buffer import DEFAULT_ALIGNMENT


class Gaps:
    """The free parts of the bytes [0, size), neighbours joined.

    Args:
        size: bytes.
        alignment: of offsets, a power of two.
    """

    def __init__(self, size: int, alignment: int = DEFAULT_ALIGNMENT):
        self._alignment = alignment
        # (start, end) in order; changed in one step, whatever interrupts
        self._gaps = [(0, size // alignment * alignment)]

    def __iter__(self):
        """(offset, bytes) of each, in order."""
        return iter([(start, end - start) for start, end in self._gaps])

    def take(self, size: int) -> int | None:
        """The offset of `size` > 0 bytes in the smallest gap that has them, the lowest of these;
        None: there is none."""
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
        """Free what `take` returned."""
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


class _Borrowed(weakref.ref):
    """Memory that a tensor uses."""

    __slots__ = ("offset", "size")

    def __new__(cls, memory: torch.Tensor, dead: Callable, offset: int, size: int):
        return super().__new__(cls, memory, dead)

    def __init__(self, memory: torch.Tensor, dead: Callable, offset: int, size: int):
        super().__init__(memory, dead)
        self.offset, self.size = offset, size


class Pool:
    """Tensors of the CPU in one arena, whose pages exist once they have been written.

    Args:
        size: bytes of the arena.

    Raises:
        MemoryError: the system has not so much address space for this process.
    """

    def __init__(self, size: int):
        self._arena = Arena(size, wiped_on_fork=False)
        self._gaps = Gaps(size)
        self._borrowed: dict[int, _Borrowed] = {}
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A contiguous, uninitialised tensor, not empty, with a storage of its own; None: there is
        no room.

        Its memory is taken back when nothing uses the storage any more.
        """
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            self._take_back()
            offset = self._gaps.take(size)
        if offset is None:
            return None
        tensor, memory = self._arena.lend(offset, shape, dtype)
        self._borrowed[offset] = _Borrowed(memory(), self._dead, offset, size)
        return tensor

    def release(self) -> None:
        """Give every page without a tensor back to the system."""
        with self._lock:
            self._take_back()
            for offset, size in self._gaps:
                self._arena.release(offset, size)

    def _dead(self, borrowed: _Borrowed) -> None:
        # without the lock: garbage is collected anywhere, under the lock as well
        self._returned.append(borrowed.offset)

    def _take_back(self) -> None:
        while self._returned:
            borrowed = self._borrowed.pop(self._returned.popleft())
            self._gaps.give_back(borrowed.offset, borrowed.size)
