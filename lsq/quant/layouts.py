"""The order of packed codes in memory, derived from what a device multiplies and loads.

Wang et al. 2024 ("Ladder", OSDI) store any type by four steps, which are here

    pad      to whole tiles of outputs and inputs
    slice    tiles into units: what one multiplication of all lanes takes, four inputs to a lane
    map      so that lanes read side by side: tile, span, field, vector, lane, input
    convert  codes to the bytes that are multiplied, in registers or in a tile of a cache

A code of w bits is cut into fields of 8, 4, 2 and 1 bits. A byte of a vector holds the fields of
as many units as fit, the first unit in the lowest bits. A span is as many units as fill whole
vectors of every field.

Imports nothing of lsq: declarations.py, which setup.py runs, reads the constants of C++ here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FOUR = 4
"""Inputs whose products an instruction adds to one sum: the bytes of a lane."""
FIELDS = (8, 4, 2, 1)
"""Widths of fields: those that fill a byte."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a device says of itself."""

    multiplications: tuple[tuple[int, int], ...]
    """(outputs, inputs) that each of its instructions multiplies at once."""
    lane_inputs: int
    """Neighbouring lanes that have different inputs of the same output."""
    line: int
    """Bytes that memory brings together."""
    together: int
    """Units of outputs that a kernel multiplies at once, to read rows less often."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The order of codes in the memory of a device."""

    lanes: tuple[int, int]
    """(outputs, groups of four inputs) of a unit; a lane has one of each."""
    pad: tuple[int, int]
    """Whole tiles: outputs, inputs."""

    @classmethod
    def of(cls, hints: Hints) -> Layout:
        """Derive the order by least common multiples, from the core outwards."""
        outputs = math.lcm(*(one for one, _ in hints.multiplications))
        across = hints.lane_inputs
        # whole lines, so that no vector is read from two of them
        outputs = math.lcm(
            outputs, math.lcm(outputs * across * FOUR, hints.line) // (across * FOUR)
        )
        unit = across * FOUR
        span = unit * FIELDS[0]  # of fields of one bit
        inputs = math.lcm(span, *(one for _, one in hints.multiplications))
        return cls(lanes=(outputs, across), pad=(outputs * hints.together, inputs))

    @property
    def vector(self) -> int:
        """Bytes of a vector: four of each lane."""
        return math.prod(self.lanes) * FOUR

    @property
    def unit_inputs(self) -> int:
        return self.lanes[1] * FOUR

    def span(self, bits: int) -> int:
        """Return the inputs of a span of codes of so many bits."""
        return self.unit_inputs * (8 if bits % 2 else 4)

    def depth(self, bits: int, inner: int) -> int:
        """Return the inputs of whole spans."""
        return -(-inner // self.span(bits)) * self.span(bits)

    def packed_bytes(self, bits: int, columns: int, inner: int) -> int:
        """Return the bytes of codes [columns, inner]: whole tiles of outputs, whole spans."""
        return -(-columns // self.pad[0]) * self.pad[0] * self.depth(bits, inner) * bits // 8


def fields_of(bits: int) -> Sequence[tuple[int, int]]:
    """Return (width, lowest bit of the code) of each field, the widest first."""
    found, low = [], 0
    for width in FIELDS:
        if bits & width:
            found.append((width, low))
            low += width
    return found


CPU = Layout.of(
    Hints(
        multiplications=((4, 4), (8, 4), (16, 4), (16, 64)),  # SSE, AVX2, AVX-512, AMX
        lane_inputs=1,
        line=64,
        together=2,
    )
)
CUDA = Layout.of(Hints(multiplications=((8, 32),), lane_inputs=4, line=128, together=2))  # mma


def constants() -> list[str]:
    """Return lines of C++: the constants of each layout."""
    return [
        f"constexpr struct {{ long outputs, unit, vector, pad; }} k{name}Layout"
        f"{{{one.lanes[0]}, {one.unit_inputs}, {one.vector}, {one.pad[0]}}};"
        for name, one in (("Cpu", CPU), ("Cuda", CUDA))
    ]
