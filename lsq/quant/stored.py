"""How the codes of a number format lie in memory, and what products make of them.

    value = unit * (step * code - zero)  or  unit * (table[code] - zero)

A type is derived from the values alone. So any number format of whole numbers, or of at most 16
values, has exact integer products (the types of Wang et al. 2024, "Ladder", OSDI).
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lsq.quant.formats import WeightFormat
from lsq.quant.layouts import CPU, CUDA, FOUR, Layout, fields_of
from lsq.quant.tables import NumberFormat

WORD = 127 * 257
"""Largest magnitude of a table of 16-bit numbers: multiples of 1/127 are exact."""
MOST = 255
"""Largest whole number of a byte, and largest magnitude of a value in whole steps."""

BYTES_SUMMED, WORDS_SUMMED = 65_793, 256
"""Products of bytes, or of 16-bit numbers, with int8 codes that a sum of 32 bits holds."""


class Decode(enum.Enum):
    """What a product multiplies instead of a code."""

    AFFINE = "affine"
    """The code itself."""
    BYTES = "bytes"
    """A whole number from a table of bytes."""
    WORDS = "words"
    """A whole number of 16 bits from a table."""
    FLOATS = "floats"
    """A float: there is no integer product."""


@dataclass(frozen=True, kw_only=True)
class StoredType:
    """The storage of a number format; codes are numbered from 0 in the order of their values."""

    bits: int
    """Width of a stored code, 1 to 8: the sum of fields of 8, 4, 2 and 1 bits."""
    decode: Decode
    unit: float = 1.0
    """Value of a whole step; products take it into their scales."""
    zero: int = 0
    """Whole number that is taken off."""
    step: int = 1
    """Whole steps from a code to the next; of AFFINE."""
    table: tuple[int, ...] = ()
    """Whole number of each code, from 0 to 255, or to 65535 of WORDS; () of AFFINE."""
    codes: tuple[int, ...] = ()
    """Stored code of each rank; (): the rank itself."""

    @property
    def whole(self) -> bool:
        """Whether products are sums of integers."""
        return self.decode is not Decode.FLOATS

    def bits_in(self, group: int) -> int:
        """Return the width in groups of so many values: odd widths fill whole spans of 32."""
        return self.bits + (self.bits % 2 and group % 32 != 0)

    def stored(self, ranks: Tensor) -> Tensor:
        """Return the stored codes uint8 of ranks uint8, any shape."""
        if not self.codes:
            return ranks
        return torch.tensor(self.codes, dtype=torch.uint8, device=ranks.device)[ranks.int()]

    def whole_values(self, codes: Tensor) -> Tensor:
        """Reference: the whole numbers int32 of stored codes, any shape; times `unit`: values."""
        if not self.table:
            return codes.int() * self.step - self.zero
        table = torch.zeros(256, dtype=torch.int32, device=codes.device)
        table[: len(self.table)] = torch.tensor(self.table, dtype=torch.int32)
        return table[codes.int()] - self.zero

    @functools.cached_property
    def table_bytes(self) -> Tensor | None:
        """The table as uint8 [32]: the lower bytes of 16 numbers, then the upper ones."""
        if not self.table:
            return None
        numbers = torch.zeros(16, dtype=torch.int32, device="cpu")
        numbers[: len(self.table)] = torch.tensor(self.table, dtype=torch.int32)
        return torch.cat([numbers & 255, numbers >> 8]).to(torch.uint8)


def most_summed(stored: StoredType) -> int:
    """Return how many products with int8 codes fit a sum of 32 bits.

    Raises:
        ValueError: the format has no integer product.
    """
    if not stored.whole:
        raise ValueError(
            f"a format of {stored.bits} bits whose values are not whole has no integer product;"
            " take a format of at most 16 values, or of whole numbers"
        )
    return WORDS_SUMMED if stored.decode is Decode.WORDS else BYTES_SUMMED


def field_bits(inner: int, stored: StoredType, group: int) -> int:
    """Return the width of stored codes in groups; the last group of an output fills its span."""
    return stored.bits_in(group) if 0 < group < inner else stored.bits


def field_bytes(shape: tuple[int, int], stored: StoredType, group: int, scales: int) -> int:
    """Return the bytes on the CPU of a weight [P, K] of fields with `scales` scales of groups.

    Raises:
        ValueError: the format has no integer product, or sums of so many do not fit 32 bits.
    """
    most = most_summed(stored)
    if min(group or shape[1], shape[1]) > most:
        raise ValueError(
            f"{group or shape[1]} products of {stored.decode.value} are summed as integers, which"
            f" hold {most}: give groups of at most {most} inputs scales of their own"
        )
    fields = CPU.packed_bytes(field_bits(shape[1], stored, group), *shape)
    return fields + 4 * scales * (-(-shape[0] // CPU.pad[0]) * CPU.pad[0])


def pack(layout: Layout, codes: Tensor, bits: int) -> Tensor:
    """Reference: pack codes uint8 [P, K] of so many bits to bytes [layout.packed_bytes]."""
    outputs, across = layout.lanes
    padding = (0, layout.depth(bits, codes.shape[1]) - codes.shape[1])
    codes = torch.nn.functional.pad(codes, (*padding, 0, -len(codes) % layout.pad[0]))
    units = layout.span(bits) // layout.unit_inputs
    # tile, output, span, unit, lane's inputs, input -> tile, span, unit, lane, input
    spans = codes.view(len(codes) // outputs, outputs, -1, units, across, FOUR)
    spans = spans.permute(0, 2, 3, 1, 4, 5).flatten(3)
    fields = []
    for width, low in fields_of(bits):
        places = spans.unflatten(2, (-1, 8 // width)) >> low & (1 << width) - 1
        shifts = width * torch.arange(8 // width, dtype=torch.uint8)
        fields.append((places << shifts[:, None]).sum(3, dtype=torch.uint8))
    return torch.cat(fields, dim=2).flatten()


def unpack(layout: Layout, packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """Reference: invert `pack`: codes uint8 [P, K]."""
    outputs, across = layout.lanes
    units = layout.span(bits) // layout.unit_inputs
    padded = (-(-shape[0] // layout.pad[0]) * layout.pad[0], layout.depth(bits, shape[1]))
    spans = padded[1] // layout.span(bits)
    vectors = packed.view(padded[0] // outputs, spans, units * bits // 8, layout.vector)
    codes, begin = 0, 0
    for width, low in fields_of(bits):
        end = begin + units * width // 8
        shifts = width * torch.arange(8 // width, dtype=torch.uint8)
        places = vectors[:, :, begin:end, None] >> shifts[:, None] & (1 << width) - 1
        codes, begin = codes | places.flatten(2, 3) << low, end
    codes = codes.unflatten(3, (outputs, across, FOUR)).permute(0, 3, 1, 2, 4, 5)
    return codes.reshape(padded)[: shape[0], : shape[1]]


class Fields(WeightFormat):
    """Codes of 1 to 7 bits as packed fields, in the order in which CUDA multiplies them.

    Fields are in two's complement; a field of 1 bit is the sign of a code of 1 or -1. Codes of
    other weight formats become fields where they are prepared for decoding.
    """

    packed = True

    @property
    def unpacked(self) -> WeightFormat:
        return WeightFormat(name=self.name, bits=self.bits, grain=self.grain)

    @property
    def largest(self) -> int:
        return super().largest if self.bits > 1 else 1

    def stored_columns(self, columns: int) -> int:
        return CUDA.depth(self.bits, columns) * self.bits // 8

    def store(self, codes: Tensor) -> Tensor:
        """Pack codes int8 [N, K] to int8 [N padded to 16, spans, bytes of a row's span]."""
        fields = (codes if self.bits > 1 else codes >> 1) & (1 << self.bits) - 1
        packed = pack(CUDA, fields.view(torch.uint8), self.bits).view(torch.int8)
        span = CUDA.span(self.bits) * self.bits // 8
        return packed.view(-1, self.stored_columns(codes.shape[1]) // span, span)

    def encode(self, values: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = self.unpacked.encode(values, clip)
        return self.store(codes), scale

    def unpack(self, stored: Tensor, columns: int) -> Tensor:
        shape, above = (len(stored), columns), 8 - self.bits
        fields = unpack(CUDA, stored.flatten().view(torch.uint8), self.bits, shape)
        codes = (fields << above).view(torch.int8) >> above
        return codes if self.bits > 1 else 2 * codes + 1


@functools.cache
def stored_type(number: NumberFormat) -> StoredType:
    """Return the storage of a number format.

    WORDS rounds each value to the nearest multiple of 1 / 32639 of the largest; all others are
    exact.
    """
    values = sorted({Fraction(value) for value in number.values if math.isfinite(value)})
    bits = (len(values) - 1).bit_length()
    unit = functools.reduce(_common_unit, values)
    steps = [int(value / unit) for value in values]
    if max(map(abs, steps)) <= MOST and steps[-1] - steps[0] <= MOST:
        shared = {"unit": float(unit), "zero": -steps[0]}
        table = tuple(step - steps[0] for step in steps)
        step = table[1]
        even = all(whole == rank * step for rank, whole in enumerate(table))
        if bits == 8 and even and step == 1 and max(map(abs, steps)) < 128:
            # as signed bytes, which AMX multiplies without a zero
            codes = tuple(step + 128 for step in steps)
            return StoredType(bits=8, decode=Decode.AFFINE, unit=float(unit), zero=128, codes=codes)
        if even and (step == 1 or bits <= 4):
            return StoredType(bits=bits, decode=Decode.AFFINE, step=step, **shared)
        if bits <= 4:
            return StoredType(bits=bits, decode=Decode.BYTES, table=table, **shared)
        return StoredType(bits=8, decode=Decode.AFFINE, codes=table, **shared)
    if bits > 4:
        return StoredType(bits=bits, decode=Decode.FLOATS)
    word = Fraction(number.largest) / WORD
    table = tuple(round(value / word) + 2**15 for value in values)
    return StoredType(bits=bits, decode=Decode.WORDS, unit=float(word), zero=2**15, table=table)


def _common_unit(a: Fraction, b: Fraction) -> Fraction:
    """Return the largest number of which a and b are whole multiples."""
    shared = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * shared), int(b * shared)), shared)
