"""A workspace: planned memory that is there only while somebody works in it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch

from lsq.memory.arena import tensor_in
from lsq.memory.buffer import Buffer
from lsq.memory.planner import plan

Life = tuple[int, int, int]
"""Bytes, and the first and last operation that needs them."""


class Workspace:
    """Tensors that stay while their memory comes and goes: between two `opened` they have addresses, but no bytes.

    Args:
        lives: of the tensors; those that are never needed together share bytes.
        device: where, as torch names it.
    """

    def __init__(self, lives: Sequence[Life], device: torch.device | str = "cpu"):
        self._offsets, self.size = _planned(tuple(lives))
        self._storage = torch.UntypedStorage(self.size, device=device)
        self._address = self._storage.data_ptr()

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The contiguous tensor of that number; made before the workspace is opened for the first time."""
        return tensor_in(self._storage, self._offsets[number], shape, dtype)

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """Around work in it; whether it lies elsewhere than the last time."""
        self._storage.resize_(self.size)
        before, self._address = self._address, self._storage.data_ptr()
        try:
            yield before != self._address
        finally:
            self._storage.resize_(0)


@lru_cache(maxsize=1024)
def _planned(lives: tuple[Life, ...]) -> tuple[list[int], int]:
    """(the offset of each, bytes of all)."""
    made = plan([
        Buffer(name=str(number), size=size, first=first, last=last)
        for number, (size, first, last) in enumerate(lives)
    ])
    return list(made.offsets.values()), made.peak
