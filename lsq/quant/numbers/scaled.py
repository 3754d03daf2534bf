"""A number format with scales: which values share one, and how scales themselves are stored.

A scale is stored as a plain float or a power of two, or in a scaled format again: the scales of a
matrix form a matrix, too. So come VS-Quant's two levels (Dai et al. 2021, arXiv:2102.04503) and
NVFP4's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lsq.quant.numbers import clips
from lsq.quant.numbers.grains import Grain, as_matrix
from lsq.quant.numbers.number import NumberFormat


@dataclass(frozen=True)
class FloatScales:
    """Scales as they are: float32, or rounded to the nearest of another dtype."""

    dtype: torch.dtype
    fine = True
    """Whether scales become about what they were, so that clips may be measured as if they stayed
    what they were."""

    def encode(self, scales: Tensor) -> Tensor:
        """What is stored of scales float32 of any shape."""
        return scales.to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        """float32."""
        return stored.float()

    def total_bits(self, shape: tuple[int, int]) -> float:
        """What scales of this shape take."""
        return math.prod(shape) * torch.finfo(self.dtype).bits


@dataclass(frozen=True)
class PowerScales:
    """E8M0: powers of two from 2^-127 to 2^127 as uint8, 255 for NaN (OCP Microscaling Formats 1.0,
    2023).

    A scale becomes the next power at or above it, so that nothing is clipped that would not have
    been; 0 becomes 2^-127. The standard leaves the rounding open and suggests the power below the
    largest value over the format's largest power, which clips; Chen et al. 2025 (arXiv:2510.25602)
    round up as well.
    """

    fine = False

    def encode(self, scales: Tensor) -> Tensor:
        """uint8 of scales float32 of any shape, none below 0."""
        mantissa, exponent = torch.frexp(scales)  # a mantissa of exactly 1/2 is a power of two
        power = (
            torch.where(scales > 0, exponent - (mantissa == 0.5).to(exponent.dtype), -127).clamp(
                -127, 127
            )
            + 127
        )
        return torch.where(scales.isfinite(), power, 255).to(torch.uint8)

    def decode(self, stored: Tensor) -> Tensor:
        """float32."""
        powers = [*(2.0**power for power in range(-127, 128)), math.nan]
        return torch.tensor(powers, dtype=torch.float32, device=stored.device)[stored.int()]

    def total_bits(self, shape: tuple[int, int]) -> float:
        """What scales of this shape take."""
        return math.prod(shape) * 8


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor in a scaled format."""

    codes: Tensor
    """uint8, the shape of the tensor."""
    scales: Tensor | Encoded
    """One for each block, [down, across]."""


@dataclass(frozen=True, kw_only=True)
class ScaledFormat:
    """Values are codes of `number` times the scale of their block, which is the clip over the
    largest code's value.

    Values beyond the clip, infinities among them, become the clip. A block of zeros has scale 0, or
    the smallest there is. NaN stays visible: it makes the clip that is measured NaN, as an infinity
    does, and with it all that shares the scale; under a clip that was given it is coded where the
    number format can do so, and otherwise makes the scale NaN.
    Where scales are in a scaled format, what shares theirs becomes NaN with it: a row for VS-Quant,
        all of NVFP4.
    """

    name: str
    number: NumberFormat
    grain: Grain
    scales: FloatScales | PowerScales | ScaledFormat

    fine = True

    def encode(
        self, x: Tensor, clip: str | Tensor = "absmax", *, percentile: float = clips.PERCENTILE
    ) -> Encoded:
        """Codes and scales of float x, any shape; all is computed in float32.

        Args:
            x: its matrix is cut into blocks along all but the last dimension, and along the last.
            clip: how clips are measured (clips.METHODS), or clips float of the shape of the blocks,
                or one for all.
            percentile: for clip="percentile", the share of |x| in percent that the clip of a block
                leaves inside.

        Raises:
            ValueError: the method or the percentile is not allowed, or the shape of the clips does
                not fit, or one is negative.
        """
        shape = as_matrix(x.shape)
        matrix = x.detach().float().reshape(shape)
        grid = self.grain.grid(shape)
        if isinstance(clip, Tensor):
            if clip.shape != grid and clip.numel() != 1:
                raise ValueError(
                    f"clips of shape {list(clip.shape)} do not fit x of shape {list(x.shape)} in"
                    f" {self.name}; give "
                    f"shape {list(grid)} or one clip"
                )
            if bool((clip < 0).any()):
                raise ValueError(
                    f"a clip given for {self.name} is {float(clip.min())}; clips must not be below"
                    " 0"
                )
            asked = clip.float().expand(grid) if clip.numel() == 1 else clip.float()
            asked = self._poisoned(asked, matrix)
        else:
            asked = clips.measure(self, matrix, clip, percentile).view(grid)
        scales = self.scales.encode(asked / self.number.largest)
        scale = self.grain.spread(self.scales.decode(scales), shape)
        steps = torch.where(scale == 0, 0.0, matrix / scale)
        return Encoded(codes=self.number.encode(steps).view(x.shape), scales=scales)

    def decode(self, encoded: Encoded) -> Tensor:
        """float32, the shape of the codes."""
        shape = as_matrix(encoded.codes.shape)
        scale = self.grain.spread(self.scales.decode(encoded.scales), shape)
        return (self.number.decode(encoded.codes).view(shape) * scale).view(encoded.codes.shape)

    def total_bits(self, shape: torch.Size | tuple[int, ...]) -> float:
        """What codes and scales of a tensor of this shape take; codes of different tensors share no
        byte."""
        codes, stored = self.number.word
        words = -(-math.prod(shape) // codes)
        return 8 * stored * words + self.scales.total_bits(self.grain.grid(as_matrix(shape)))

    def bits_per_value(self, shape: torch.Size | tuple[int, ...]) -> float:
        """total_bits over the number of values; NaN where there are none."""
        numel = math.prod(shape)
        return self.total_bits(shape) / numel if numel else math.nan

    def _poisoned(self, clip: Tensor, matrix: Tensor) -> Tensor:
        """Clips [down, across], NaN for blocks with a NaN that the number format cannot say."""
        missing = matrix.isnan()
        if any(map(math.isnan, self.number.values)) or not missing.any():
            return clip
        blocks, _ = self.grain.split(missing)
        return clip.masked_fill(blocks.any(1).view(clip.shape), math.nan)
