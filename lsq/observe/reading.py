"""What one look at a module found: signal-to-noise in decibels, and how little may do."""

import math
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

LEAST, MOST = -60.0, 120.0
"""Decibels are brought into this range: of nothing but noise, of none."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Signal-to-noise of one module in one pass, in dB.

    None: there is no such thing, or no signal in it.
    """

    output: float | None = None
    """The worst of its results."""
    input_gradient: float | None = None
    """The worst of the gradients of its inputs."""
    weight_gradient: float | None = None
    """Of the gradients of its weights together: one with hardly any gradient may be all noise, and
    does not matter."""

    def values(self) -> dict[str, float]:
        """Those that there are, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def worst(self, other: "Reading") -> "Reading":
        """The smaller of both, of each quantity."""
        mine, others = self.values(), other.values()
        return Reading(
            **{
                name: min(mine.get(name, math.inf), others.get(name, math.inf))
                for name in mine | others
            }
        )


QUANTITIES = tuple(field.name for field in fields(Reading))


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The least signal-to-noise in dB with which a module trains well.

    Where they are from: docs/numbers.md.

    Raises:
        ValueError: one of them is no number.
    """

    output: float = 12.0
    """Of results."""
    input_gradient: float = 8.0
    """Of gradients of inputs."""
    weight_gradient: float = 4.0
    """Of gradients of weights, all together."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or math.isnan(value):
                raise ValueError(
                    f"{name} is {value!r}; it must be a number of decibels, -inf for no bound"
                )

    def broken(self, reading: Reading) -> list[str]:
        """What of a reading is below, in words."""
        return [
            f"{name.replace('_', ' ')} {value:.1f} dB, below {getattr(self, name):.1f}"
            for name, value in reading.values().items()
            if value < getattr(self, name)
        ]


def decibels(*pairs: tuple[Tensor, Tensor, int]) -> float | None:
    """Signal-to-noise of tensors together: 10 log10(signal / noise), or None without signal.

    It is the smaller one of two: signal and noise of everything, of which a few large values
    decide; and the mean over slices of the noise of a slice in parts of its own signal, of which
    many small ones decide. Slices without a signal, and those that should not be finite, do not
    count.

    Args:
        pairs: (expected [M, N], found [M, N], dimension along which slices go: 1 for rows, 0 for
            columns) each.
    """
    parts = [_slices(*pair) for pair in pairs]
    signal, noise = (
        (torch.cat([part[index] for part in parts]) for index in range(2))
        if parts
        else (None, None)
    )
    if signal is None or not len(signal):
        return None
    share = max((noise.sum() / signal.sum()).item(), (noise / signal).mean().item())
    return (
        min(max(-10 * math.log10(share), LEAST), MOST)
        if 0 < share < math.inf
        else MOST
        if share == 0
        else LEAST
    )


def _slices(expected: Tensor, found: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Signal and noise of each slice that counts."""
    expected, found = expected.float(), found.float()
    if expected.dim() < 2:
        expected, found, dim = expected.reshape(1, -1), found.reshape(1, -1), 1
    signal = expected.square().sum(dim)
    there = (signal > 0) & signal.isfinite()
    return signal[there], (found - expected).square().sum(dim)[there].nan_to_num(nan=math.inf)
