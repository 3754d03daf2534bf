"""Which values of a product's gradient share a scale when it is rounded to int8, and where the
scale comes from.

A gradient [M, N] has M rows (tokens) and N columns (outputs of the product); the scales of the
weight's rows are folded in. dX multiplies it along N, dW along M. A *grain* says the largest
magnitude that the scale of each value allows; what lies beyond is clipped. All are plain PyTorch
and slow.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lsq.quant import arithmetic
from lsq.quant.formats import GRADIENT
from lsq.quant.random import uniform_rows

SMALLEST = 1e-30
"""What a row's magnitude is divided by at least."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a backward pass a gradient is."""

    product: int
    """Whose, counted from 0."""
    follows: bool = False
    """The end of the product before, which multiplied its own gradient, made this one."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of `rows` x `columns` values have the largest of them; None: all rows, or all
    columns."""

    rows: int | None
    columns: int | None

    def magnitudes(self, gradient: Tensor, place: Place) -> Tensor:
        """Float32 that broadcasts to gradient [M, N]; as each scale wants it."""
        magnitude = gradient.abs()
        for axis, size in enumerate((self.rows, self.columns)):
            magnitude = _largest(magnitude, axis, size)
        for axis, size in enumerate((self.rows, self.columns)):
            if size is not None and size > 1:
                magnitude = magnitude.repeat_interleave(size, axis).narrow(
                    axis, 0, gradient.shape[axis]
                )
        return magnitude


class Delayed:
    """One scale, from the largest value of the last `history` passes times `margin`; at first from
    this one."""

    def __init__(self, *, history: int, margin: float = 1.0):
        self._history, self._margin = history, margin
        self._seen: dict[int, deque[Tensor]] = {}

    def magnitudes(self, gradient: Tensor, place: Place) -> Tensor:
        """See Blocks."""
        now = gradient.abs().amax().reshape(1, 1)
        seen = self._seen.setdefault(place.product, deque([now], maxlen=self._history))
        found = torch.stack(tuple(seen)).amax(dim=0) * self._margin
        seen.append(now)
        return found


class PredictedRows:
    """A scale for each row; where the end of a product makes the gradient, from the row of the
    gradient before it.

    The end of a product has only a part of a row, but it knows the scale of the row that it
    multiplied. The largest value is taken to be the largest of that row times a factor, the largest
    such ratio of the last pass. Other
    gradients have the largest values of their own rows: norms and losses, which make them, hold
        these whole.
    """

    def __init__(self):
        self._factor: dict[int, Tensor] = {}
        self._before: Tensor | None = None

    def magnitudes(self, gradient: Tensor, place: Place) -> Tensor:
        """See Blocks."""
        own, before = gradient.abs().amax(dim=1, keepdim=True), self._before
        self._before = own
        if not place.follows:
            return own
        now = (own / before.clamp_min(SMALLEST)).amax()
        factor = self._factor.get(place.product, now)
        self._factor[place.product] = now
        return before * factor


@dataclass(frozen=True)
class Codes:
    """A rounded matrix."""

    codes: Tensor
    """Float32 whole numbers, [M, N]."""
    scale: Tensor
    """Broadcasts to it."""

    @property
    def values(self) -> Tensor:
        return self.codes * self.scale


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a gradient is rounded for both products that read it."""

    grain: Blocks | Delayed | PredictedRows
    """Of the gradient that dX reads, and dW, too, unless `weight_grain` says another."""
    weight_grain: Blocks | None = None
    folded: bool = False
    """There is a scale for each row, which dW folds into x and rounds that again, with a scale for
    each column."""
    stochastic: bool = True
    power_of_two: bool = False
    """Scales are the next power of two."""

    def round(
        self, gradient: Tensor, place: Place, generator: torch.Generator
    ) -> tuple[Codes, Codes]:
        """What dX and dW read of gradient [M, N]."""
        first = self._encode(self.grain, gradient, place, generator)
        if self.weight_grain is None:
            return first, first
        return first, self._encode(self.weight_grain, gradient, place, generator)

    def watch(self, gradient: Tensor, place: Place) -> None:
        """Keep what later passes need to know of this one."""
        if not isinstance(self.grain, Blocks):
            self.grain.magnitudes(gradient, place)

    def _encode(self, grain, gradient: Tensor, place: Place, generator: torch.Generator) -> Codes:
        magnitude = grain.magnitudes(gradient, place)
        scale, reciprocal = arithmetic.gradient_scale(magnitude)
        if self.power_of_two:
            scale = torch.where(scale > 0, scale.log2().ceil().exp2(), 0.0)
            reciprocal = torch.where(scale > 0, 1 / scale, 0.0)
        return Codes(codes_of(gradient * reciprocal, generator if self.stochastic else None), scale)


COLUMNS = Blocks(rows=None, columns=1)


def folded(x: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """x [M, K] times the scales [M, 1] of a gradient's rows, rounded again with a scale for each
    column: its values."""
    scaled = x * scale
    step, reciprocal = arithmetic.gradient_scale(COLUMNS.magnitudes(scaled, Place(product=0)))
    return codes_of(scaled * reciprocal, generator) * step


def codes_of(scaled: Tensor, generator: torch.Generator | None) -> Tensor:
    """Whole numbers for values in units of their scale: at random as products do it, or the nearest
    (None)."""
    if generator is None:
        rounded = scaled.round()
    else:
        key = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator)
        rounded = (scaled + uniform_rows(key, 0, *scaled.shape)).floor_()
    return rounded.clamp_(-GRADIENT.largest, GRADIENT.largest)


def _largest(magnitude: Tensor, axis: int, size: int | None) -> Tensor:
    """The largest of each `size` along an axis."""
    if size is None:
        return magnitude.amax(dim=axis, keepdim=True)
    if size == 1:
        return magnitude
    missing = -magnitude.shape[axis] % size
    padding = (0, missing) if axis == 1 else (0, 0, 0, missing)
    return (
        torch.nn.functional.pad(magnitude, padding).unflatten(axis, (-1, size)).amax(dim=axis + 1)
    )


def _square(size: int, **options) -> Scheme:
    return Scheme(grain=Blocks(rows=size, columns=size), **options)


ROW, TENSOR = Blocks(rows=1, columns=None), Blocks(rows=None, columns=None)
GROUPS = {"grain": Blocks(rows=1, columns=128), "weight_grain": Blocks(rows=128, columns=1)}
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "row": lambda: Scheme(grain=ROW, folded=True),
    "row, x not rounded again": lambda: Scheme(grain=ROW),
    "row, nearest": lambda: Scheme(grain=ROW, folded=True, stochastic=False),
    "row, predicted": lambda: Scheme(grain=PredictedRows(), folded=True),
    "row, predicted, power of two": lambda: Scheme(
        grain=PredictedRows(), folded=True, power_of_two=True
    ),
    "1x128 and 128x1": lambda: Scheme(**GROUPS),
    "32x32": lambda: _square(32),
    "64x64": lambda: _square(64),
    "128x128": lambda: _square(128),
    "128x128, nearest": lambda: _square(128, stochastic=False),
    "128x128, power of two": lambda: _square(128, power_of_two=True),
    "column": lambda: Scheme(grain=COLUMNS),
    "tensor": lambda: Scheme(grain=TENSOR),
    "tensor, nearest": lambda: Scheme(grain=TENSOR, stochastic=False),
    "tensor, delayed by 1": lambda: Scheme(grain=Delayed(history=1)),
    "tensor, delayed by 16": lambda: Scheme(grain=Delayed(history=16)),
    "tensor, delayed by 16, twice": lambda: Scheme(grain=Delayed(history=16, margin=2.0)),
}
"""Name -> the scheme, with no pass seen yet; stochastic unless it says otherwise.

The first is what products do.
"""
