"""Formats of codes: width, storage, values that share a scale, and the format of each tensor.

Code that stores codes, allocates them or needs the largest code asks the format; no other place
knows the number of bits. The format of a weight also encodes floats for storage, and unpacks stored
bytes for products. N rows, K columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lsq.quant.arithmetic import largest_clips, maximum_code, mean_clips, quantize


@dataclass(frozen=True)
class Grain:
    """Blocks of `rows` rows and `columns` columns of a matrix [R, C] that share a scale; None: all.

    The last blocks may be smaller. A tensor of another number of dimensions is a matrix with its
    last dimension as columns.
    """

    rows: int | None
    columns: int | None

    TENSOR: ClassVar[Grain]
    ROW: ClassVar[Grain]

    def __post_init__(self) -> None:
        if any(size is not None and size < 1 for size in (self.rows, self.columns)):
            raise ValueError(
                f"blocks of {self.rows!r} rows and {self.columns!r} columns; give whole numbers"
                " from 1 on, or None for all there are"
            )

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of blocks of a matrix [R, C], (down, across); (0, 0) if it is empty."""
        if 0 in shape:
            return 0, 0
        rows, columns = self._sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return blocks [B, N] of a matrix [R, C], row by row, and bool [B, N]: inside the matrix.

        Zeros fill up blocks that reach beyond the matrix. The mask is None if no block does.
        """
        rows, columns = self._sizes(matrix.shape)
        down, across = self.grid(matrix.shape)
        padding = (0, across * columns - matrix.shape[1], 0, down * rows - matrix.shape[0])

        def cut(padded: Tensor) -> Tensor:
            return (
                padded.view(down, rows, across, columns)
                .transpose(1, 2)
                .reshape(down * across, rows * columns)
            )

        if not any(padding):
            return cut(matrix.contiguous()), None
        inside = torch.ones(matrix.shape, dtype=torch.bool, device=matrix.device)
        return cut(torch.nn.functional.pad(matrix, padding)), cut(
            torch.nn.functional.pad(inside, padding)
        )

    def spread(self, grid: Tensor, shape: tuple[int, int]) -> Tensor:
        """Give each value of a matrix [R, C] the entry of its block in `grid` [down, across];
        broadcasts to [R, C]."""
        if 0 in shape:
            return grid.new_zeros(shape)
        rows, columns = self._sizes(shape)
        if grid.shape[0] > 1:
            grid = grid.repeat_interleave(rows, 0)[: shape[0]]
        if grid.shape[1] > 1:
            grid = grid.repeat_interleave(columns, 1)[:, : shape[1]]
        return grid

    def _sizes(self, shape: tuple[int, int]) -> tuple[int, int]:
        return self.rows or shape[0], self.columns or shape[1]


Grain.TENSOR = Grain(None, None)
Grain.ROW = Grain(1, None)
BLOCKS = re.compile(r"group([1-9]\d*)|block([1-9]\d*)x([1-9]\d*)")
NAMED = {"tensor": Grain.TENSOR, "row": Grain.ROW, "channel": Grain(None, 1)}


def grain(name: str) -> Grain:
    """Return the grain called `name`. Raises ValueError: there is none."""
    if name in NAMED:
        return NAMED[name]
    blocks = BLOCKS.fullmatch(name)
    if blocks is None:
        raise ValueError(
            f"no grain is called {name!r}; allowed: tensor, row, channel (a column), group16 (so"
            " many columns of a row), block4x16 (rows and columns)"
        )
    group, rows, columns = blocks.groups()
    return Grain(1, int(group)) if group else Grain(int(rows), int(columns))


def as_matrix(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return (R, C) of a tensor of any shape: C is its last dimension."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


@dataclass(frozen=True, kw_only=True)
class Format:
    """Symmetric integers with scales."""

    name: str
    bits: int
    """Width of a code, 2 to 8."""
    grain: Grain
    """Values that share a scale: Grain.TENSOR or Grain.ROW for products; formats may go finer."""
    storage: torch.dtype = torch.int8
    """Dtype of one stored code."""

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return maximum_code(self.bits)

    def scales(self, rows: int) -> int:
        """Return the number of scales of a matrix with `rows` rows."""
        return rows if self.grain == Grain.ROW else 1


class WeightFormat(Format):
    """Storage of a weight: int8 [N, stored columns], and one float32 scale for each row.

    Products read int8 codes [N, K] times that scale. Subclasses pack the codes of a row; this class
    stores the codes themselves.
    """

    packed = False
    """Whether stored bytes must be unpacked before products can read them."""

    @property
    def ternary(self) -> bool:
        """Whether the codes are -1, 0 and 1, so that a clip is a scale."""
        return self.largest == 1

    def measured_clips(self, rows: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the clips of a weight [N, K] that do not learn, in the shape of those `before`:
        the largest magnitudes of rows, or mean magnitudes for ternary codes."""
        return (mean_clips if self.ternary else largest_clips)(rows, before)

    def stored_columns(self, columns: int) -> int:
        """Return the bytes of a stored row of K codes; a row of zeros is stored as zeros."""
        return columns

    def encode(self, values: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: encode floats [N, K] to (stored bytes int8 [N, stored columns], scale float32
        [N]).

        clip [N] or [1]. A NaN makes the scales of all rows under its clip NaN.
        """
        codes, scale, _ = quantize(values, clip, self.bits)
        return codes, scale.expand(len(values))

    def unpack(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        """Reference: the codes int8 [N, K] of stored bytes, none beyond `largest`."""
        return stored

    @property
    def unpacked(self) -> WeightFormat:
        """Format of the codes that `unpack` returns; this one itself unless it is packed."""
        return self


GROUP, TRIED, PARTS = 32, 4, 64
"""Of Int4: inputs that share a multiplier, multipliers to try, and parts of a step in errors."""


class Int4Codes(WeightFormat):
    """The unpacked codes m * q of Int4, which products read."""

    @property
    def largest(self) -> int:
        return 120


class Int4(Int4Codes):
    """4-bit codes q, two to a byte, with a whole multiplier m for each group of 32 inputs.

    A value is scale * m * q: m is from -15 to 15, q from -8 to 7, and the scale is clip / 120, so
    that products read m * q. A group is stored as m and 16 bytes: codes i and i + 16 in the lower
    and the upper half of byte i. Zeros fill up the last group of a row. Two levels of scales: Dai
    et al. 2021 (VS-Quant, arXiv:2102.04503).
    """

    packed = True

    @property
    def unpacked(self) -> WeightFormat:
        return Int4Codes(name=self.name, bits=self.bits, grain=self.grain)

    def stored_columns(self, columns: int) -> int:
        return -(-columns // GROUP) * (1 + GROUP // 2)

    def encode(self, values: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (clip / self.largest).expand(len(values))
        x = values / scale[:, None]
        missing = x.isnan()
        steps = x.masked_fill(missing, 0.0).clamp(-self.largest, self.largest)
        padded = torch.nn.functional.pad(steps, (0, -steps.shape[1] % GROUP))
        groups = padded.view(len(values), -1, GROUP)
        multiplier = _best_multiplier(groups)
        codes = _group_codes(groups, multiplier).to(torch.int8)
        low, high = codes.split(GROUP // 2, dim=2)
        stored = torch.cat([multiplier.to(torch.int8), low & 15 | high << 4], dim=2).flatten(1)
        poisoned = missing.any(dim=1) if self.grain == Grain.ROW else missing.any()
        return stored, scale.masked_fill(poisoned, math.nan)

    def unpack(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        multiplier, pairs = stored.view(len(stored), -1, 1 + GROUP // 2).split(
            [1, GROUP // 2], dim=2
        )
        codes = torch.cat([pairs << 4 >> 4, pairs >> 4], dim=2)
        return (codes * multiplier).flatten(1)[:, :columns]


def _best_multiplier(groups: torch.Tensor) -> torch.Tensor:
    """Return the multipliers float32 [N, G, 1] of least squared error for groups [N, G, 32] in
    steps of the scale. The first gives the largest value code -8; smaller ones clip it with finer
    steps. Errors are whole numbers of 1/64 steps, so that their sums do not depend on the order."""
    low, high = groups.aminmax(dim=2, keepdim=True)
    sign = torch.where(-low > high, 1.0, -1.0)
    first = (torch.maximum(-low, high) / 8).ceil()
    tried = torch.stack([(first - less).clamp_min(1.0) * sign for less in range(TRIED)])
    rest = (groups - _group_codes(groups, tried) * tried) * PARTS
    best = (
        rest.round().to(torch.int32).square().sum(dim=3, keepdim=True).argmin(dim=0, keepdim=True)
    )
    return tried.gather(0, best).squeeze(0)


def _group_codes(groups: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """q, as floats."""
    return (groups / multiplier).round().clamp(-8, 7)


WEIGHT_FORMATS: dict[str, Callable[[int, Grain], WeightFormat]] = {
    "int8": lambda bits, grain: WeightFormat(name="int8", bits=bits, grain=grain),
    "int4": lambda bits, grain: Int4(name="int4", bits=8, grain=grain),
}
"""QuantConfig.weight_format -> function of (bits of integers, grain of clips) that makes the
format. C++ has lsq_round_<name> for each format, and lsq_unpack_<name> for packed formats."""
NARROW = re.compile(r"(?:int([2-8])|ternary)[/-](row|tensor)(?:/float32)?")
"""Scaled formats whose codes are integers with one scale for each row, or for the tensor."""


def weight_format(name: str, bits: int, grain: Grain) -> WeightFormat | None:
    """Return the format `name` if products read its codes: one of WEIGHT_FORMATS, with integers of
    so many bits and clips of this grain, or of NARROW; else None."""
    if name in WEIGHT_FORMATS:
        return WEIGHT_FORMATS[name](bits, grain)
    narrow = NARROW.fullmatch(name)
    if narrow is None:
        return None
    width, blocks = narrow.groups()
    return WEIGHT_FORMATS["int8"](int(width or 2), NAMED[blocks])


GRADIENT = Format(name="gradient", bits=8, grain=Grain.ROW)
"""Format of gradients under backward="int8": rounded at random without bias; scales of rows."""
NORMALISED = Format(name="normalised", bits=8, grain=Grain.ROW)
"""Format of the normalised rows that the backward pass of a norm reads, rounded to the nearest."""


@dataclass(frozen=True)
class FormatChoice:
    """The format of each tensor: one for all, and exceptions for names that fit a pattern.

    If several patterns fit, the last one counts.
    """

    others: str
    exceptions: tuple[tuple[str, str], ...] = ()
    """(pattern with * and ?, format), in order."""

    @property
    def formats(self) -> tuple[str, ...]:
        return self.others, *(form for _, form in self.exceptions)

    def of(self, *names: str) -> str:
        """Return the format of a tensor with these names."""
        fitting = (form for pattern, form in reversed(self.exceptions) if _fits(pattern, names))
        return next(fitting, self.others)

    def at(
        self,
        path: str,
        tensors: Mapping[str, Sequence[str]],
        fitted: MutableMapping[str, set[str]],
        *,
        read: bool = False,
    ) -> str:
        """Return the choice for the part of a model at module path `path`, as text.

        Args:
            tensors: tensors of the part -> their names in its state dict.
            fitted: gets the patterns that fit -> the formats of the tensors that they fit.
            read: whether the first name is the tensor's own, and the others those of weights that
                it is multiplied by.

        Raises:
            ValueError: the weights of one tensor get different formats.
        """
        chosen = {}
        for own, theirs in tensors.items():
            names = [f"{path}.{name}" if path else name for name in theirs]
            form = chosen[own] = self._common(names[:read], names[read:])
            for pattern, _ in self.exceptions:
                if _fits(pattern, names):
                    fitted.setdefault(pattern, set()).add(form)
        others = (
            self.others
            if self.others in chosen.values() or not chosen
            else next(iter(chosen.values()))
        )
        return ",".join(
            [others, *(f"{own}={form}" for own, form in chosen.items() if form != others)]
        )

    def _common(self, own: Sequence[str], weights: Sequence[str]) -> str:
        forms = [self.of(*own, weight) for weight in weights] or [self.of(*own)]
        if len(set(forms)) > 1:
            what = "the input of " if own else ""
            given = (f"{form} to {what}{one}" for form, one in zip(forms, weights, strict=True))
            raise ValueError(
                f"gives {', '.join(given)}; but these are one tensor here: give all of them one"
                " format, or call lsq.convert with fused=False"
            )
        return forms[0]


def _fits(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


@cache
def format_choice(text: str) -> FormatChoice:
    """Read "int8,*fc2*=nvfp4,encoder.layers.0.*=float32": a format for all, then exceptions.

    Formats are not checked. Raises ValueError: the text has another form.
    """
    others, *exceptions = text.split(",")
    pairs = tuple(tuple(part.strip() for part in one.split("=")) for one in exceptions)
    if "=" in others or not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ValueError(
            f"{text!r} does not say which tensors have which format; write one format for all, then"
            " exceptions: int8,*fc2*=nvfp4,encoder.layers.0.*=float32"
        )
    return FormatChoice(others.strip(), pairs)


def check_choice(name: str, text: object, check: Callable[[str], None]) -> None:
    """Raise ValueError, with `name` in it, if `format_choice` cannot read the text, or `check`
    refuses a format."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r}; it must be the name of a format, such as 'int8'")
    try:
        for form in format_choice(text).formats:
            check(form)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}: {error}") from None
