"""Number formats: how wide codes are, how they are stored, and how many values share a scale.

Whoever stores codes, allocates them or names their largest asks the format; nothing else knows a
number of bits. That of a weight also says how floats become what is stored, and how that becomes
what products read. N rows, K columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lsq.quant.numbers.grains import Grain
from lsq.quant.rounding import maximum_code, quantize


@dataclass(frozen=True, kw_only=True)
class Format:
    """Symmetric integers with scales."""

    name: str
    bits: int
    """Width of a code, 2 to 8."""
    grain: Grain
    """Of scales: Grain.TENSOR or Grain.ROW.

    Products know no other; what lies within a row is for its format to say.
    """
    storage: torch.dtype = torch.int8
    """What codes are stored in, one to an element."""

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return maximum_code(self.bits)

    def scales(self, rows: int) -> int:
        """How many scales a matrix of `rows` rows has."""
        return rows if self.grain == Grain.ROW else 1


class WeightFormat(Format):
    """How a weight is stored: int8 [N, stored columns], and one float32 scale for each row.

    Products read int8 codes [N, K] times that scale, so all that lies within a row is for the
    format to say. This one stores what products read.
    """

    packed = False
    """Whether what is stored must be unpacked before products can read it."""

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
    def unpacked(self) -> "WeightFormat":
        """That of the codes which `unpack` gives; packed formats have another one."""
        return self


GROUP, TRIED, PARTS = 32, 4, 64
"""Of Int4: inputs that share a multiplier; multipliers that are tried; parts of a step in which
errors are counted."""


class Int4Codes(WeightFormat):
    """What products read of Int4: the codes m * q."""

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
    """float32 [N, G, 1] of least squared error for groups [N, G, 32] of values in steps of the
    scale.

    The largest value of a group gets code -8. With smaller multipliers it is clipped, but steps are
    finer: those are tried as well. Errors are whole numbers of parts, whose sums do not depend on
        their order.
    """
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
and a grain of clips.

csrc/cpu and csrc/cuda have lsq_round_<name> for each, and lsq_unpack_<name> for those that are
packed.
"""
GRADIENT = Format(name="gradient", bits=8, grain=Grain.ROW)
"""What gradients are rounded to under backward="int8", at random and without bias: a scale for each
row."""
NORMALISED = Format(name="normalised", bits=8, grain=Grain.ROW)
"""As what the backward pass of a norm finds the rows that were normalised, rounded to the nearest.
"""
