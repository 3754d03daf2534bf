"""Activation and dropout of a product, which stand at its end, and what is kept to undo them in the backward pass.

M rows, P columns. GELU is the exact one, x * Phi(x) (Hendrycks & Gimpel 2016).
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch

from lsq.program.declare import Activations, Bits, Codes, In, Value
from lsq.program.values import Dropout, dropped
from lsq.quant import pack_bits, unpack_bits

SLOPE_UNIT = 112
"""|gelu'| < 1.13: the slope times this, rounded, is an int8 (csrc/arithmetic.h: kSlopeUnit)."""


class Activation(IntEnum):
    """What is applied to a product."""

    none = 0
    relu = 1
    gelu = 2


class Nonlinearity(Value):
    """dropout(activation(y)) of y [M, P]."""

    activation: Activation = Activation.none
    dropout: In[Dropout] | None
    positive: Bits | None
    """Of ReLU: y > 0."""
    slope: Codes | None
    """Of GELU: [M, P], gelu'(y) * SLOPE_UNIT, rounded; 0 for NaN."""
    before: Activations | None
    """Of GELU in float mode: [M, P], y."""

    def apply(self, y: torch.Tensor) -> torch.Tensor:
        """Reference."""
        if self.activation == Activation.relu:
            y = y.clamp_min(0.0)
        elif self.activation == Activation.gelu:
            y = torch.nn.functional.gelu(y)
        return dropped(y, self.dropout)

    def keep(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reference: what the written fields hold."""
        slope = (gelu_slope(y) * SLOPE_UNIT).round().nan_to_num(nan=0.0).to(torch.int8)
        return pack_bits(y > 0), slope, y

    def undo(self, gradient: torch.Tensor) -> torch.Tensor:
        """Reference: the gradient of y from that of the result."""
        gradient = dropped(gradient, self.dropout)
        if self.positive is not None:
            return torch.where(unpack_bits(self.positive, gradient.numel()).view(gradient.shape), gradient, 0.0)
        if self.slope is not None:
            return gradient * (self.slope.to(torch.float32) * (1.0 / SLOPE_UNIT))
        return gradient if self.before is None else gradient * gelu_slope(self.before)


def gelu_slope(y: torch.Tensor) -> torch.Tensor:
    """The derivative of GELU."""
    density = torch.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(y / math.sqrt(2))) + y * density
