"""Memory for messages, kept from one exchange to the next."""

import math

import torch
from torch import Tensor


class Scratch:
    """Named pieces of memory that grow to the largest size asked for.

    Exchanges run one after another, so all buckets share them.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pieces: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """A contiguous tensor of this shape and dtype with any content; the last one of that name
        becomes invalid."""
        size = math.prod(shape) * dtype.itemsize
        piece = self._pieces.get(name)
        if piece is None or piece.numel() < size:
            piece = self._pieces[name] = torch.empty(
                max(size, 16), dtype=torch.uint8, device=self.device
            )
        return piece[:size].view(dtype).view(shape)
