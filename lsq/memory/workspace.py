"""A workspace: planned memory in which one pass at a time works."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch

from lsq.memory.arena import Arena, tensor_in
from lsq.memory.buffer import Buffer
from lsq.memory.planner import plan

Life = tuple[int, int, int]
"""Bytes, and the first and last operation that needs them."""


class Room:
    """Memory for workspaces, of which one is open at a time, by whoever holds `lock`.

    Args:
        device: its device.
        lasting_bytes: address space of the CPU that stays, more than any workspace needs: all
            workspaces begin at its first byte, which caches then know. 0: PyTorch's allocator gives
            memory for each use of a workspace, and takes it back.

    Raises:
        MemoryError: the system has not so much address space for this process.
    """

    def __init__(self, device: torch.device | str, lasting_bytes: int = 0):
        self.lock = threading.Lock()
        self.device = torch.device(device)
        self.arena = Arena(lasting_bytes) if lasting_bytes else None

    def release(self) -> None:
        """Give memory back to the system while nobody works here."""
        if self.arena is not None:
            self.arena.release(0, self.arena.size)


class Workspace:
    """Tensors that share bytes unless they are needed together; they hold nothing after each use.

    Args:
        room: its memory.
        lives: of the tensors.
    """

    def __init__(self, room: Room, lives: Sequence[Life]):
        self._offsets, self.size = _planned(tuple(lives))
        self._arena = room.arena
        if self._arena is None:
            self._storage = torch.UntypedStorage(self.size, device=room.device)
            self._address = self._storage.data_ptr()

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The contiguous tensor of that number; made before the workspace is first opened.

        Outside `opened`, it has an address, but perhaps no bytes.
        """
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


@lru_cache(maxsize=1024)
def _planned(lives: tuple[Life, ...]) -> tuple[list[int], int]:
    """(the offset of each, bytes of all)."""
    buffers = [
        Buffer(name=str(number), size=size, first=first, last=last)
        for number, (size, first, last) in enumerate(lives)
    ]
    result = plan(buffers, method="training")
    return list(result.offsets.values()), result.peak
