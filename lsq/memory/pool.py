"""Memory for tensors that come and go: what those of one step have given back, those of the next
one take."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from lsq.memory.arena import Arena
from lsq.memory.gaps import Gaps


class _Lent(weakref.ref):
    """Memory in other hands."""

    __slots__ = ("offset", "size")

    def __new__(cls, memory: torch.Tensor, dead: Callable, offset: int, size: int):
        return super().__new__(cls, memory, dead)

    def __init__(self, memory: torch.Tensor, dead: Callable, offset: int, size: int):
        super().__init__(memory, dead)
        self.offset, self.size = offset, size


class Pool:
    """Tensors of the CPU in one arena, of which pages are there once they have been written.

    Args:
        size: bytes of the arena.

    Raises:
        MemoryError: the system has not so much address space for this process.
    """

    def __init__(self, size: int):
        self._arena = Arena(size, wiped_on_fork=False)
        self._gaps = Gaps(size)
        self._lent: dict[int, _Lent] = {}
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A contiguous tensor with a storage of its own and whatever values; None: there is no
        room. No empty ones.

        Its memory is taken back when nothing uses the storage any more.
        """
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            self._take_back()
            offset = self._gaps.take(size)
        if offset is None:
            return None
        tensor, memory = self._arena.lend(offset, shape, dtype)
        self._lent[offset] = _Lent(memory(), self._dead, offset, size)
        return tensor

    def release(self) -> None:
        """Give every page that no tensor lies in back to the system."""
        with self._lock:
            self._take_back()
            for offset, size in self._gaps:
                self._arena.release(offset, size)

    def _dead(self, lent: _Lent) -> None:
        # without the lock: garbage is collected anywhere, under the lock as well
        self._returned.append(lent.offset)

    def _take_back(self) -> None:
        while self._returned:
            lent = self._lent.pop(self._returned.popleft())
            self._gaps.give_back(lent.offset, lent.size)
