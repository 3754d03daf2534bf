"""Number formats as plain data: how wide codes are, how they are stored, and how many values share a scale.

Whoever stores codes, allocates them or names their largest asks the format; nothing else knows a number of bits.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from lsq.quant.rounding import maximum_code


class Grain(Enum):
    """Which values of a matrix [R, C] share one scale."""

    TENSOR = "all of them"
    ROW = "those of a row"


@dataclass(frozen=True, kw_only=True)
class Format:
    """Symmetric integers with scales."""

    name: str
    bits: int
    """Width of a code, 2 to 8."""
    grain: Grain
    storage: torch.dtype = torch.int8
    """What codes are stored in, one to an element."""

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return maximum_code(self.bits)

    def scales(self, rows: int) -> int:
        """How many scales a matrix of `rows` rows has."""
        return rows if self.grain is Grain.ROW else 1


GRADIENT = Format(name="gradient", bits=8, grain=Grain.ROW)
"""What gradients are rounded to under backward="int8", at random and without bias: a scale for each row."""
