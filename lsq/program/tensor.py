"""Virtual tensors: what a program's operations read and write before there is memory for it."""

import math
from dataclasses import dataclass

import torch

from lsq.program.parameters import Parameter


@dataclass(eq=False, kw_only=True)
class VirtualTensor:
    """A tensor that does not exist yet. Tensors are equal only to themselves."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    role: str = "temporary"
    """"input", "parameter", "output", "gradient" (of an input or parameter) or "temporary"."""
    declared: Parameter | None = None
    """The declaration of a parameter."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {dtype}[{', '.join(map(str, self.shape))}]"
