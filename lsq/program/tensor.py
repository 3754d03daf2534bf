"""Virtual tensors, which have no memory yet, and the parameters that a module makes of them."""

import math
from dataclasses import dataclass
from enum import Enum

import torch


class Kind(Enum):
    WEIGHT = "of a product; rounded, where anything is"
    BIAS = "added to a product"
    TABLE = "rows that are looked up"
    ADAPTER = "of low rank, added to a weight"
    NORM_WEIGHT = "of a norm"
    NORM_BIAS = "of a norm"
    WEIGHT_CLIP = "of a weight; measured, then learned"
    ACTIVATION_CLIP = "of an activation; measured, then learned"


CLIPS = (Kind.WEIGHT_CLIP, Kind.ACTIVATION_CLIP)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    """Name in a module's state dict."""
    shape: tuple[int, ...]
    kind: Kind
    start: float = 0.0
    """Initial value of every element, unless bound or deviation is given."""
    bound: float = 0.0
    """Elements begin uniformly distributed in ±bound, if it is not 0."""
    deviation: float = 0.0
    """Standard deviation of normally distributed initial elements, if not 0."""
    clip: str | None = None
    """Name of a WEIGHT's clip, if the weight is rounded."""
    in_out: bool = False
    """Whether a WEIGHT is [K, N], so that its transpose is rounded."""

    def initialise(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            if self.bound:
                tensor.uniform_(-self.bound, self.bound)
            elif self.deviation:
                tensor.normal_(std=self.deviation)
            else:
                tensor.fill_(self.start)


def fan_in(inputs: int) -> float:
    """Return 1 / sqrt(inputs), the bound of torch.nn.Linear's initial weights and biases."""
    return 1.0 / math.sqrt(inputs)


def xavier(outputs: int, inputs: int) -> float:
    """Return the bound of Glorot & Bengio 2010 for a matrix [outputs, inputs]."""
    return math.sqrt(6.0 / (inputs + outputs))


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
        """Size in bytes."""
        return self.numel() * self.dtype.itemsize

    @property
    def is_temporary(self) -> bool:
        """Whether the tensor stays inside its program."""
        return self.role == "temporary"

    def numel(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {dtype}[{', '.join(map(str, self.shape))}]"
