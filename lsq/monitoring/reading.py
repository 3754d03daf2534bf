"""What one look at a module found: signal-to-noise in decibels, and how little may do."""

import math
from dataclasses import asdict, dataclass, fields

from torch import Tensor

LEAST, MOST = -60.0, 120.0
"""Decibels are brought into this range: of nothing but noise, of none."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Signal-to-noise of one module in one pass, in dB. None: there is no such thing, or no signal in it."""

    output: float | None = None
    """The worst of its results."""
    input_gradient: float | None = None
    """The worst of the gradients of its inputs."""
    weight_gradient: float | None = None
    """The worst of the gradients of its weights."""

    def values(self) -> dict[str, float]:
        """Those that there are, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


QUANTITIES = tuple(field.name for field in fields(Reading))


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The least signal-to-noise in dB with which a module trains well. Where they are from: docs/quality.md.

    Raises:
        ValueError: one of them is no number.
    """

    output: float = 12.0
    """Of results."""
    input_gradient: float = 8.0
    """Of gradients of inputs."""
    weight_gradient: float = 5.0
    """Of gradients of weights."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or math.isnan(value):
                raise ValueError(f"{name} is {value!r}; it must be a number of decibels, -inf for no bound")

    def broken(self, reading: Reading) -> list[str]:
        """What of a reading is below, in words."""
        return [
            f"{name.replace('_', ' ')} {value:.1f} dB, below {getattr(self, name):.1f}"
            for name, value in reading.values().items()
            if value < getattr(self, name)
        ]


def decibels(expected: Tensor, found: Tensor, dim: int) -> float | None:
    """Signal-to-noise of `found` [M, N], which should be `expected`: 10 log10(signal / noise), or None without signal.

    It is the smaller one of two: signal and noise of the whole tensor, of which a few large values decide; and the mean
    over slices along `dim` (rows for 1, columns for 0) of the noise of a slice in parts of its own signal, of which
    many small ones decide. Slices without a signal, and those that should not be finite, do not count.
    """
    expected, found = expected.float(), found.float()
    if expected.dim() < 2:
        expected, found, dim = expected.reshape(1, -1), found.reshape(1, -1), 1
    signal = expected.square().sum(dim)
    there = (signal > 0) & signal.isfinite()
    signal, noise = signal[there], (found - expected).square().sum(dim)[there].nan_to_num(nan=math.inf)
    if not len(signal):
        return None
    share = max((noise.sum() / signal.sum()).item(), (noise / signal).mean().item())
    return min(max(-10 * math.log10(share), LEAST), MOST) if 0 < share < math.inf else MOST if share == 0 else LEAST
