"""A number format with scales: which values share one, how scales themselves are stored, and how
the clip of each block is measured.

A scale is stored as a plain float or a power of two, or in a scaled format again: the scales of a
matrix form a matrix, too. So come VS-Quant's two levels (Dai et al. 2021, arXiv:2102.04503) and
NVFP4's.

Clips by "mse" are OCTAV's (Sakr et al. 2022, arXiv:2206.06501) for integers and a search for all
others; those by "kl" lose least information (Migacz 2017, "8-bit inference with TensorRT").

Shapes: B blocks of N values, in [-1, 1] once they are divided by their largest magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from lsq.quant.calibration import octav_clip, sample_stride
from lsq.quant.numbers.grains import Grain, as_matrix
from lsq.quant.numbers.number import NumberFormat
from lsq.quant.numbers.tables import integer

METHODS = ("absmax", "percentile", "mse", "kl")
"""absmax: the largest magnitude; percentile: all but a share of the magnitudes; mse and kl: see
above."""
PERCENTILE = 99.99
INTEGERS = {integer(bits): bits for bits in range(2, 9)}
"""What OCTAV knows."""
BINS = 1024
"""Of a histogram from the lowest to the highest value, under "kl"."""
POOLED = 4096
"""Blocks of fewer values share a histogram."""
MOST = 2.0**127
"""Codes times scales stay finite under it, also where scales are rounded up to powers of two."""
TOGETHER = 2**16
"""Values whose errors are searched at once, which stay in cache; longer blocks one by one."""


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
        self, x: Tensor, clip: str | Tensor = "absmax", *, percentile: float = PERCENTILE
    ) -> Encoded:
        """Codes and scales of float x, any shape; all is computed in float32.

        Args:
            x: its matrix is cut into blocks along all but the last dimension, and along the last.
            clip: how clips are measured (METHODS), or clips float of the shape of the blocks,
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
            asked = measure(self, matrix, clip, percentile).view(grid)
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


def measure(form: ScaledFormat, matrix: Tensor, method: str, percentile: float) -> Tensor:
    """Clips float32 [B] of the blocks of a matrix [R, C] float32: 0 for zeros, NaN where not all is
    finite.

    Of long blocks, mse and kl look at a sample (calibration.sample_stride). No clip is above MOST.

    Raises:
        ValueError: `method` or `percentile` is not allowed.
    """
    if method not in METHODS:
        raise ValueError(
            f"clip is {method!r}; allowed: {', '.join(map(repr, METHODS))}, or a tensor of clips"
        )
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile!r}; it must be above 0 and at most 100")
    if not matrix.numel():
        return matrix.new_zeros(0)
    return _measured(form, matrix, method, percentile).clamp(max=MOST)


def _measured(form: ScaledFormat, matrix: Tensor, method: str, percentile: float) -> Tensor:
    blocks, inside = form.grain.split(matrix)
    largest = blocks.abs().amax(1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, math.nan)
    if method == "absmax":
        return largest.squeeze(1)
    # also where there is a NaN, as its clip is known
    blocks = torch.where(largest > 0, blocks / largest, 0.0)
    if method == "percentile":
        return (largest * _percentile(blocks, inside, percentile)).squeeze(1)
    stride = sample_stride(blocks.shape[1])
    blocks, inside = blocks[:, ::stride], None if inside is None else inside[:, ::stride]
    if method == "kl":
        return (largest * _least_information_lost(form, blocks, inside)).squeeze(1)
    several = max(1, TOGETHER // blocks.shape[1])
    insides = repeat(None) if inside is None else inside.split(several)
    parts = zip(blocks.split(several), insides, largest.split(several), strict=False)
    return torch.cat([_least_error(form, *part) for part in parts])


def _least_error(
    form: ScaledFormat, blocks: Tensor, inside: Tensor | None, largest: Tensor
) -> Tensor:
    """[B], in units of the values."""
    if form.scales.fine and form.number in INTEGERS:
        clip = octav_clip(blocks, INTEGERS[form.number], per_channel=True).unsqueeze(1)
    else:
        clip = _least_squares(form, blocks, inside, largest)
    return (largest * clip).squeeze(1)


def _percentile(blocks: Tensor, inside: Tensor | None, percentile: float) -> Tensor:
    """[B, 1]; the largest magnitude, 1, where this would be 0.

    Zeros that fill up a block come first in order.
    """
    width = blocks.shape[1]
    count = (
        torch.full((len(blocks), 1), width, device=blocks.device)
        if inside is None
        else inside.sum(1, keepdim=True)
    )
    place = width - count + (count * (percentile / 100) - 1e-9).ceil().long().clamp(min=1) - 1
    found = blocks.abs().sort(1).values.gather(1, place)
    return torch.where(found > 0, found, 1.0)


def _least_squares(
    form: ScaledFormat, blocks: Tensor, inside: Tensor | None, largest: Tensor
) -> Tensor:
    """[B, 1] of least squared error: of 42 clips from 2 down to 2^-10 in equal ratios, then of 17
    around the best.

    Clips above 1 pay for formats that are coarse at their upper end. Errors are those under the
    scale that is stored, unless that depends on other blocks.
    """

    def error(clip: Tensor) -> Tensor:
        scale = clip / form.number.largest
        if not form.scales.fine:
            scale = form.scales.decode(form.scales.encode(scale * largest)) / largest.clamp(
                min=1e-45
            )
        rounding = form.number.decode(form.number.encode(blocks / scale)) * scale - blocks
        if inside is not None:
            rounding = rounding.masked_fill(~inside, 0.0)
        return rounding.square().sum(1, keepdim=True, dtype=torch.float64).nan_to_num(nan=math.inf)

    def best(candidates: Tensor) -> Tensor:
        errors = torch.cat([error(clip) for clip in candidates.split(1, dim=1)], dim=1)
        return candidates.gather(1, errors.argmin(1, keepdim=True))

    ratios = 2 ** torch.linspace(1, -10, 42, dtype=torch.float32, device=blocks.device)
    clip = best(ratios.expand(len(blocks), -1).contiguous())
    return best(clip * torch.linspace(0.84, 1.16, 17, dtype=torch.float32, device=blocks.device))


def _least_information_lost(form: ScaledFormat, blocks: Tensor, inside: Tensor | None) -> Tensor:
    """[B, 1]: the clip under which the histogram of codes says most about that of values, of 33
    down to 1/64.

    P is the histogram with all that is clipped in its outermost bins; Q spreads what has the same
    code, without what is clipped, evenly over those bins of it that hold anything. The divergence
    sum P log(P / Q) is least, with a bin that only clipped values fill counted as 1e-6 in Q. Blocks
    of fewer than 4,096 values are too short for a histogram of
    their own: all share one, and the same clip over their largest. Rounding of scales is not looked
        at.
    """
    together = blocks.shape[1] < POOLED
    centres = (torch.arange(BINS, dtype=torch.float32, device=blocks.device) + 0.5) * (2 / BINS) - 1
    ratios = 2 ** torch.linspace(0, -6, 33, dtype=torch.float32, device=blocks.device)
    place = ((blocks + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
    weight = torch.ones_like(blocks) if inside is None else inside.float()
    weight = weight * blocks.any(1, keepdim=True)  # blocks of zeros say nothing to the others
    if together:
        place, weight = place.reshape(1, -1), weight.reshape(1, -1)
    histogram = weight.new_zeros(len(place), BINS).scatter_add_(1, place, weight)
    divergences = [_divergence(form, histogram, centres, float(ratio)) for ratio in ratios]
    return ratios[torch.stack(divergences).argmin(0)].unsqueeze(1)


def _divergence(form: ScaledFormat, histogram: Tensor, centres: Tensor, clip: float) -> Tensor:
    """[B] for histograms [B, bins]; infinite where the clip leaves no bin or no value inside."""
    kept = (centres.abs() <= clip).nonzero().flatten()
    if not kept.numel():
        return histogram.new_full((len(histogram),), math.inf)
    first, last = int(kept[0]), int(kept[-1])
    plain = histogram[:, first : last + 1]
    clipped = plain.clone()
    clipped[:, 0] += histogram[:, :first].sum(1)
    clipped[:, -1] += histogram[:, last + 1 :].sum(1)
    codes = form.number.encode(centres[first : last + 1] / (clip / form.number.largest)).long()
    same = torch.nn.functional.one_hot(
        codes.unique(return_inverse=True)[1]
    ).float()  # [bins, codes]
    evenly = (plain @ same / ((clipped > 0).float() @ same).clamp(min=1)) @ same.T
    total = plain.sum(1, keepdim=True)
    p = clipped / clipped.sum(1, keepdim=True).clamp(min=1)
    q = (evenly / total.clamp(min=1)).clamp(min=1e-6)
    return (
        torch.where(p > 0, p * (p / q).log(), 0.0)
        .sum(1)
        .masked_fill(total.squeeze(1) == 0, math.inf)
    )
