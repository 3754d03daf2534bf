"""What a program declares of its parameters: shape, kind and how they begin.

A module makes them real.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch


class Kind(Enum):
    """What a parameter is for."""

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
    """A float32 parameter."""

    name: str
    """As in a module's state dict."""
    shape: tuple[int, ...]
    kind: Kind
    start: float = 0.0
    """Every element's first value, where nothing else is said."""
    bound: float = 0.0
    """Elements begin uniformly in ±bound, where it is not 0."""
    deviation: float = 0.0
    """Elements begin normally distributed with this standard deviation, where it is not 0."""
    clip: str | None = None
    """Of a WEIGHT: the name of its clip, where it is rounded."""
    in_out: bool = False
    """Of a WEIGHT: it is [K, N], and rounded as its transpose."""

    def initialise(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with first values."""
        with torch.no_grad():
            if self.bound:
                tensor.uniform_(-self.bound, self.bound)
            elif self.deviation:
                tensor.normal_(std=self.deviation)
            else:
                tensor.fill_(self.start)


def fan_in(inputs: int) -> float:
    """1 / sqrt(inputs): the bound from which torch.nn.Linear draws weights and biases."""
    return 1.0 / math.sqrt(inputs)


def xavier(outputs: int, inputs: int) -> float:
    """The bound of Glorot & Bengio 2010 for a matrix [outputs, inputs]."""
    return math.sqrt(6.0 / (inputs + outputs))
