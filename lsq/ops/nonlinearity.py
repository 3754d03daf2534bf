"""Activation and dropout in a product's epilogue, and the values that undo them.

M rows, P columns. GELU: x * Phi(x), exact or by tanh (Hendrycks & Gimpel 2016). SiLU: x / (1 +
exp(-x)) (Elfwing et al. 2018). Squared ReLU: max(x, 0)^2 (So et al. 2021, Primer).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from enum import IntEnum

import torch
from torch.nn import functional

from lsq.program.declare import Activations, Bits, Codes, In, Value
from lsq.program.values import Coded, Dropout, dropped
from lsq.quant import pack_bits, unpack_bits

SLOPE_UNIT = 112
"""Unit of slopes: round(slope * this) fits into int8 up to a slope of 1.13 (kSlopeUnit)."""


class Activation(IntEnum):
    """Activation functions."""

    none = 0
    relu = 1
    gelu = 2
    gelu_tanh = 3
    silu = 4
    squared_relu = 5

    @property
    def values(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Reference: the function, of any tensor."""
        return _VALUES[self]

    @property
    def slope(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Reference: the derivative of the function."""
        return _SLOPES[self]

    @property
    def bounded_slope(self) -> bool:
        """Whether the slope takes more than two values, all within +-1.13, and is kept as int8."""
        return self in (Activation.gelu, Activation.gelu_tanh, Activation.silu)


class Nonlinearity(Value):
    """The map of y [M, P] to dropout(activation(y))."""

    activation: Activation = Activation.none
    dropout: In[Dropout] | None
    positive: Bits | None  # y > 0, for ReLU.
    slope: Codes | None
    """[M, P], bounded slope at y times SLOPE_UNIT, rounded; 0 for NaN."""
    before: Activations | None  # [M, P], y, for other activations or in float mode.

    def apply(self, y: torch.Tensor) -> torch.Tensor:
        """Reference: the result for y [M, P]."""
        return dropped(Activation(self.activation).values(y), self.dropout)

    def keep(self, y: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Reference: the written fields for y [M, P]."""
        slope = None
        if self.slope is not None:
            steps = (Activation(self.activation).slope(y) * SLOPE_UNIT).round()
            slope = steps.nan_to_num(nan=0.0).to(torch.int8)
        return {"positive": pack_bits(y > 0), "slope": slope, "before": y}

    def undo(self, gradient: torch.Tensor) -> torch.Tensor:
        """Reference: the gradient of y from that of the result."""
        gradient = dropped(gradient, self.dropout)
        if self.positive is not None:
            positive = unpack_bits(self.positive, gradient.numel()).view(gradient.shape)
            return torch.where(positive, gradient, 0.0)
        if self.slope is not None:
            return gradient * (self.slope.to(torch.float32) * (1.0 / SLOPE_UNIT))
        if self.before is None:
            return gradient
        return gradient * Activation(self.activation).slope(self.before)


def epilogue(y: torch.Tensor, nonlinearity: Nonlinearity | None, rounded: Coded | None) -> dict:
    """Reference: the fields `out`, `rounded` and `nonlinearity` of a product y [M, P]."""
    result = y if nonlinearity is None else nonlinearity.apply(y)
    return {
        "out": result,
        "rounded": rounded and rounded.encode(result),
        "nonlinearity": nonlinearity and nonlinearity.keep(y),
    }


def _gelu_slope(y: torch.Tensor) -> torch.Tensor:
    density = torch.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(y / math.sqrt(2))) + y * density


def _gelu_tanh_slope(y: torch.Tensor) -> torch.Tensor:
    y = y.clamp(-10, 10)  # the slope is constant beyond, and the polynomial would overflow
    gate = math.sqrt(8 / math.pi) * (y + 0.044715 * y**3)
    return _gated_slope(y, gate, math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * y * y))


def _gated_slope(
    y: torch.Tensor, gate: torch.Tensor, gate_slope: torch.Tensor | float
) -> torch.Tensor:
    """Return the derivative of y * sigmoid(gate)."""
    return torch.sigmoid(gate) + y * torch.sigmoid(gate) * torch.sigmoid(-gate) * gate_slope


_VALUES = {
    Activation.none: lambda y: y,
    Activation.relu: functional.relu,
    Activation.gelu: functional.gelu,
    Activation.gelu_tanh: functools.partial(functional.gelu, approximate="tanh"),
    Activation.silu: functional.silu,
    Activation.squared_relu: lambda y: functional.relu(y).square(),
}
_SLOPES = {
    Activation.none: torch.ones_like,
    Activation.relu: lambda y: (y > 0).to(y.dtype),
    Activation.gelu: _gelu_slope,
    Activation.gelu_tanh: _gelu_tanh_slope,
    Activation.silu: lambda y: _gated_slope(y, y, 1.0),
    Activation.squared_relu: lambda y: 2 * functional.relu(y),
}
