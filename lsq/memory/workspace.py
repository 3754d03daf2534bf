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


class Workspace:
    """Tensors of which those that are never needed together share bytes.

    What they hold is gone after each use.

    Args:
        lives: of the tensors.
    """

    def __init__(self, lives: Sequence[Life]):
        self._offsets, self.size = _planned(tuple(lives))

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The contiguous tensor of that number; made before the workspace is opened for the first
        time."""
        raise NotImplementedError

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """Around work in it; whether it lies elsewhere than the last time."""
        raise NotImplementedError


class Room:
    """Where workspaces are, of which one is open at a time.

    Attributes:
        lock: held by whoever works in one of them.
    """

    def __init__(self):
        self.lock = threading.Lock()

    def workspace(self, lives: Sequence[Life]) -> Workspace:
        """A new one in this room."""
        raise NotImplementedError

    def release(self) -> None:
        """Give memory back to the system while nobody works here."""


class LastingRoom(Room):
    """Memory of the CPU that stays: all workspaces begin at its first byte, so that caches know it.

    Args:
        size: bytes of address space, more than any workspace needs.

    Raises:
        MemoryError: the system has not so much for this process.
    """

    def __init__(self, size: int):
        super().__init__()
        self._arena = Arena(size)

    def workspace(self, lives: Sequence[Life]) -> Workspace:
        return _LastingWorkspace(lives, self._arena)

    def release(self) -> None:
        self._arena.release(0, self._arena.size)


class _LastingWorkspace(Workspace):
    def __init__(self, lives: Sequence[Life], arena: Arena):
        super().__init__(lives)
        self._arena = arena

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.tensor(self._offsets[number], shape, dtype)

    @contextmanager
    def opened(self) -> Iterator[bool]:
        yield False


class PassingRoom(Room):
    """Memory that comes from PyTorch's allocator for each use of a workspace, and goes back.

    Args:
        device: where, as torch names it.
    """

    def __init__(self, device: torch.device | str):
        super().__init__()
        self._device = torch.device(device)

    def workspace(self, lives: Sequence[Life]) -> Workspace:
        return _PassingWorkspace(lives, self._device)


class _PassingWorkspace(Workspace):
    """Between two `opened`, tensors have addresses, but no bytes."""

    def __init__(self, lives: Sequence[Life], device: torch.device):
        super().__init__(lives)
        self._storage = torch.UntypedStorage(self.size, device=device)
        self._address = self._storage.data_ptr()

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return tensor_in(self._storage, self._offsets[number], shape, dtype)

    @contextmanager
    def opened(self) -> Iterator[bool]:
        self._storage.resize_(self.size)
        before, self._address = self._address, self._storage.data_ptr()
        try:
            yield before != self._address
        finally:
            self._storage.resize_(0)


@lru_cache(maxsize=1024)
def _planned(lives: tuple[Life, ...]) -> tuple[list[int], int]:
    """(the offset of each, bytes of all)."""
    made = plan(
        [
            Buffer(name=str(number), size=size, first=first, last=last)
            for number, (size, first, last) in enumerate(lives)
        ]
    )
    return list(made.offsets.values()), made.peak
