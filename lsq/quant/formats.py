"""Formats of codes: how wide they are, how they are stored, which values share a scale, and which
tensors have which format.

Whoever stores codes, allocates them or names their largest asks the format; nothing else knows a
number of bits. That of a weight also says how floats become what is stored, and how that becomes
what products read. N rows, K columns.
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

from lsq.quant.arithmetic import maximum_code, quantize


@dataclass(frozen=True)
class Grain:
    """A matrix [R, C] is cut into blocks of `rows` rows and `columns` columns, each with a scale;
    None: all there are.

    The last blocks may be smaller. Tensors of another number of dimensions are matrices of their
    last one.
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
        """Blocks of a matrix [R, C]: (down, across); none where it has no values."""
        if 0 in shape:
            return 0, 0
        rows, columns = self._sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Blocks [B, N] of a matrix [R, C], row by row, and bool [B, N] of what lies in the matrix.

        Blocks that reach out of it are filled up with zeros; no bool where none does.
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
    """The grain of that name. Raises ValueError: there is none."""
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
    """(R, C) of a tensor of any shape: C is its last dimension."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


@dataclass(frozen=True, kw_only=True)
class Format:
    """Symmetric integers with scales."""

    name: str
    bits: int
    """Width of a code, 2 to 8."""
    grain: Grain
    """Values that share a scale: Grain.TENSOR or Grain.ROW. Products know no other; a format may
    divide rows further."""
    storage: torch.dtype = torch.int8
    """Dtype of one stored code."""

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return maximum_code(self.bits)

    def scales(self, rows: int) -> int:
        """Number of scales of a matrix of `rows` rows."""
        return rows if self.grain == Grain.ROW else 1


class WeightFormat(Format):
    """Storage of a weight: int8 [N, stored columns], and one float32 scale for each row. Products
    read int8 codes [N, K] times that scale; a format decides what a row stores for them. This one
    stores the codes themselves.
    """

    packed = False
    """Stored bytes must be unpacked before products can read them."""

    def stored_columns(self, columns: int) -> int:
        """Bytes of a stored row of K codes; rows of zeros are zeros there, too."""
        return columns

    def encode(self, values: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: (what is stored, int8 [N, stored columns], scale float32 [N]) of floats [N,
        K].

        clip [N] or [1]. The scales of what shares a clip with a NaN are NaN.
        """
        codes, scale, _ = quantize(values, clip, self.bits)
        return codes, scale.expand(len(values))

    def unpack(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        """Reference: the codes int8 [N, K] of what is stored; none is beyond `largest`."""
        return stored

    @property
    def unpacked(self) -> WeightFormat:
        """Format of the codes that `unpack` returns; packed formats have another one."""
        return self


GROUP, TRIED, PARTS = 32, 4, 64
"""In Int4: inputs that share a multiplier; multipliers to try; parts of a step in which errors are
counted."""


class Int4Codes(WeightFormat):
    """The codes m * q of Int4, which products read."""

    @property
    def largest(self) -> int:
        return 120


class Int4(Int4Codes):
    """4-bit codes q, two to a byte, and a whole multiplier m for each group of 32 inputs: a value
    is scale * m * q.

    m is from -15 to 15, q from -8 to 7, and the scale is clip / 120, so that products read m * q. A
    stored group is m and 16 bytes, codes i and i + 16 in the lower and the upper half of byte i;
    the last group of a row is filled up with zeros. Two levels of scales: Dai et al. 2021
    (VS-Quant, arXiv:2102.04503).
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
    """float32 [N, G, 1] of least squared error for groups [N, G, 32] in steps of the scale. The
    largest value of a group gets code -8. Smaller multipliers clip it, but have finer steps. Errors
    are whole numbers of parts, whose sums do not depend on their order."""
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
"""Names that QuantConfig.weight_format may have -> what makes the format, of a width of integers
and a grain of clips. C++ has lsq_round_<name> for each, and lsq_unpack_<name> for packed ones."""
GRADIENT = Format(name="gradient", bits=8, grain=Grain.ROW)
"""Format of gradients under backward="int8", rounded at random without bias: a scale for each
row."""
NORMALISED = Format(name="normalised", bits=8, grain=Grain.ROW)
"""As what the backward pass of a norm finds the rows that were normalised, rounded to the nearest.
"""


@dataclass(frozen=True)
class FormatChoice:
    """Which format a tensor has: one for all, and others for those whose names fit a pattern.

    Of several patterns that fit, the last one counts.
    """

    others: str
    exceptions: tuple[tuple[str, str], ...] = ()
    """(pattern with * and ?, format) in order."""

    @property
    def formats(self) -> tuple[str, ...]:
        return self.others, *(form for _, form in self.exceptions)

    def of(self, *names: str) -> str:
        """The format of a tensor that is called so, or has several names."""
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
        """The patterns that concern the part of a model at `path`, as text. `tensors`: its
        tensors -> their names in its state dict. `fitted` gets the patterns that fit one -> the
        formats of all that they fit. `read`: names are the tensor's own, then those of weights
        that it is multiplied by. Raises ValueError: the weights of one tensor get different
        formats."""
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
    """Raise ValueError, with `name` in it, for a choice that `format_choice` cannot read, or with a
    format that `check` refuses."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r}; it must be the name of a format, such as 'int8'")
    try:
        for form in format_choice(text).formats:
            check(form)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}: {error}") from None
