"""Number formats: how wide codes are, how they are stored, and how many values share a scale.

Whoever stores codes, allocates them or names their largest asks the format; nothing else knows a number of bits. That
of a weight also says how floats become what is stored, and how that becomes what products read. N rows, K columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from lsq.quant.rounding import maximum_code, quantize


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


class WeightFormat(Format):
    """How a weight is stored: int8 [N, stored columns], and one float32 scale for each row.

    Products read int8 codes [N, K] times that scale, so all that lies within a row is for the format to say. This one
    stores what products read.
    """

    packed = False
    """Whether what is stored must be unpacked before products can read it."""

    def stored_columns(self, columns: int) -> int:
        """Bytes of a stored row of K codes; rows of zeros are zeros there, too."""
        return columns

    def encode(self, values: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: (what is stored, int8 [N, stored columns], scale float32 [N]) of floats [N, K].

        clip [N] or [1]. The scales of what shares a clip with a NaN are NaN.
        """
        codes, scale, _ = quantize(values, clip, self.bits)
        return codes, scale.expand(len(values))

    def unpack(self, stored: torch.Tensor, columns: int) -> torch.Tensor:
        """Reference: the codes int8 [N, K] of what is stored; none is beyond `largest`."""
        return stored


WEIGHT_FORMATS: dict[str, Callable[[int, Grain], WeightFormat]] = {
    "int8": lambda bits, grain: WeightFormat(name="int8", bits=bits, grain=grain),
}
"""Names that QuantConfig.weight_format may have -> what makes the format, of a width of integers and a grain of clips.

csrc/cpu has lsq_round_<name> for each, and lsq_unpack_<name> for those that are packed.
"""
GRADIENT = Format(name="gradient", bits=8, grain=Grain.ROW)
"""What gradients are rounded to under backward="int8", at random and without bias: a scale for each row."""
