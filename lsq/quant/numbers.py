"""Number formats with scales, by name: values of codes, blocks that share a scale, stored scales.

    <number>/<grain>/<scales>, as in int4/group16/uint4, or a preset, as mxint8

A scale is stored as a float, as a power of two, or in a scaled format: the scales of a matrix form
a matrix, too. VS-Quant's two levels (Dai et al. 2021, arXiv:2102.04503) and NVFP4's are such
formats. "mse" finds clips by OCTAV (Sakr et al. 2022, arXiv:2206.06501) for integers, by a search
for all other numbers.

Shapes: B blocks of N values, in [-1, 1] once they are divided by their largest magnitude.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat

import torch
from torch import Tensor

from lsq.quant.calibration import octav_clip, sample_stride
from lsq.quant.formats import Grain, as_matrix, grain
from lsq.quant.tables import (
    SOURCES,
    NumberFormat,
    fp4_e2m1,
    fp8_e4m3,
    fp8_e5m2,
    integer,
    lloyd_max,
    logarithmic,
    multiplier,
    nf4,
    ternary,
)

METHODS = ("absmax", "percentile", "mse", "kl")
"""absmax: the largest magnitude; percentile: a quantile of magnitudes; mse: least squared error;
kl: least divergence of histograms."""
BINS = 128
"""Of the histogram of a block's magnitudes, for "kl"."""
TINY_SHARE = 1e-4
"""Of one value, for a bin of q that is empty: the divergence stays finite."""
PERCENTILE = 99.99
INTEGERS = {integer(bits): bits for bits in range(2, 9)}
"""Number formats whose clips OCTAV finds -> bits."""
MOST = 2.0**127
"""Largest clip: codes times scales stay finite, even if scales are rounded up to powers of 2."""
TOGETHER = 2**16
"""Values whose errors are searched at once, to stay in cache; longer blocks go one by one."""


@dataclass(frozen=True)
class FloatScales:
    """Scales stored as float32, or rounded to the nearest of another float dtype."""

    dtype: torch.dtype
    fine = True
    """Whether stored scales are so exact that clips may be measured as if they were not rounded."""

    def encode(self, scales: Tensor) -> Tensor:
        """Encode float32 scales of any shape."""
        return scales.to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        return stored.float()

    def total_bits(self, shape: tuple[int, int]) -> float:
        return math.prod(shape) * torch.finfo(self.dtype).bits


@dataclass(frozen=True)
class PowerScales:
    """E8M0: powers of two, 2^-127 to 2^127, as uint8; 255: NaN (OCP Microscaling Formats 1.0,
    2023). A scale becomes the next power at or above it (Chen et al. 2025, arXiv:2510.25602), so
    nothing more is clipped; 0 becomes 2^-127. The standard leaves the rounding open, and suggests
    one that clips."""

    fine = False

    def encode(self, scales: Tensor) -> Tensor:
        """Encode float32 scales of any shape, none below 0, as uint8."""
        mantissa, exponent = torch.frexp(scales)  # a mantissa of exactly 1/2 is a power of two
        power = (
            torch.where(scales > 0, exponent - (mantissa == 0.5).to(exponent.dtype), -127).clamp(
                -127, 127
            )
            + 127
        )
        return torch.where(scales.isfinite(), power, 255).to(torch.uint8)

    def decode(self, stored: Tensor) -> Tensor:
        powers = [*(2.0**power for power in range(-127, 128)), math.nan]
        return torch.tensor(powers, dtype=torch.float32, device=stored.device)[stored.int()]

    def total_bits(self, shape: tuple[int, int]) -> float:
        return math.prod(shape) * 8


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor in a scaled format."""

    codes: Tensor
    """uint8, the shape of the tensor."""
    scales: Tensor | Encoded
    """A scale for each block, [down, across]."""


@dataclass(frozen=True, kw_only=True)
class ScaledFormat:
    """A number format with a scale for each block: value = value of the code * scale.

    The scale is the block's clip / the largest value of the number format. Values beyond the clip,
    infinities among them, become the clip. A block of zeros has scale 0, or the smallest scale.

    NaN stays visible. A measured clip becomes NaN from a NaN or an infinity, and so do all values
    that share the scale. Under a given clip, NaN has a code if the number format has one; else it
    makes the scale NaN. If scales are themselves in a scaled format, a NaN scale makes all scales
    NaN that share its scale: a row for VS-Quant, the whole tensor for NVFP4.
    """

    name: str
    number: NumberFormat
    grain: Grain
    scales: FloatScales | PowerScales | ScaledFormat

    fine = True

    def encode(
        self, x: Tensor, clip: str | Tensor = "absmax", *, percentile: float = PERCENTILE
    ) -> Encoded:
        """Encode float x, of any shape, to codes and scales; all is computed in float32.

        `clip` is one of METHODS (`percentile` % of |x| lie inside), or clips of the shape of the
        blocks, or one for all. Raises ValueError: the method, the percentile or a clip is not
        allowed.
        """
        shape = as_matrix(x.shape)
        matrix = x.detach().float().reshape(shape)
        grid = self.grain.grid(shape)
        if isinstance(clip, Tensor):
            if clip.shape != grid and clip.numel() != 1:
                raise ValueError(
                    f"clips of shape {list(clip.shape)} do not fit x of shape {list(x.shape)} in"
                    f" {self.name}; give shape {list(grid)} or one clip"
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
        """Return the values, float32 in the shape of the codes."""
        shape = as_matrix(encoded.codes.shape)
        scale = self.grain.spread(self.scales.decode(encoded.scales), shape)
        return (self.number.decode(encoded.codes).view(shape) * scale).view(encoded.codes.shape)

    def total_bits(self, shape: torch.Size | tuple[int, ...]) -> float:
        """Return the bits of codes and scales of a tensor of this shape; tensors share no byte."""
        codes, stored = self.number.word
        words = -(-math.prod(shape) // codes)
        return 8 * stored * words + self.scales.total_bits(self.grain.grid(as_matrix(shape)))

    def bits_per_value(self, shape: torch.Size | tuple[int, ...]) -> float:
        numel = math.prod(shape)
        return self.total_bits(shape) / numel if numel else math.nan

    def _poisoned(self, clip: Tensor, matrix: Tensor) -> Tensor:
        """Return clips [down, across], NaN for blocks with a NaN that has no code."""
        missing = matrix.isnan()
        if any(map(math.isnan, self.number.values)) or not missing.any():
            return clip
        blocks, _ = self.grain.split(missing)
        return clip.masked_fill(blocks.any(1).view(clip.shape), math.nan)


def measure(form: ScaledFormat, matrix: Tensor, method: str, percentile: float) -> Tensor:
    """Measure the clips float32 [B] of the blocks of a float32 matrix [R, C], at most MOST. A block
    of zeros gets 0, a block with NaN or infinity NaN. "mse" and "kl" read a sample of long blocks
    (calibration.sample_stride). Raises ValueError: `method` or `percentile` is not allowed."""
    if method not in METHODS:
        raise ValueError(
            f"clip is {method!r}; allowed: {', '.join(map(repr, METHODS))}, or a tensor of clips"
        )
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile!r}; it must be above 0 and at most 100")
    if not matrix.numel():
        return matrix.new_zeros(0)
    blocks, inside = form.grain.split(matrix)
    largest = blocks.abs().amax(1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, math.nan)
    # blocks with a NaN become 0, too: their clip is known
    blocks = torch.where(largest > 0, blocks / largest, 0.0)
    if method == "absmax":
        clip = largest
    elif method == "percentile":
        clip = largest * _percentile(blocks, inside, percentile)
    else:
        stride = sample_stride(blocks.shape[1])
        blocks, inside = blocks[:, ::stride], None if inside is None else inside[:, ::stride]
        several = max(1, TOGETHER // blocks.shape[1])
        insides = repeat(None) if inside is None else inside.split(several)
        parts = zip(blocks.split(several), insides, largest.split(several), strict=False)
        search = _least_squares if method == "mse" else _least_divergence
        clip = torch.cat([search(form, *part) for part in parts])
    return clip.squeeze(1).clamp(max=MOST)


def _percentile(blocks: Tensor, inside: Tensor | None, percentile: float) -> Tensor:
    """Return percentiles [B, 1], or 1, the largest, instead of 0. Padding zeros do not count."""
    width = blocks.shape[1]
    count = (
        torch.full((len(blocks), 1), width, device=blocks.device)
        if inside is None
        else inside.sum(1, keepdim=True)
    )
    position = width - count + (count * (percentile / 100) - 1e-9).ceil().long().clamp(min=1) - 1
    found = blocks.abs().sort(1).values.gather(1, position)
    return torch.where(found > 0, found, 1.0)


def _least_squares(
    form: ScaledFormat, blocks: Tensor, inside: Tensor | None, largest: Tensor
) -> Tensor:
    """Return the clips [B, 1] of least squared error: OCTAV's for integers. Other numbers try 42
    clips from 2 down to 2^-10 in equal ratios, then 17 around the best; clips above 1 pay for
    formats that are coarse at their upper end. Errors are under stored scales, unless these depend
    on other blocks."""
    if form.scales.fine and form.number in INTEGERS:
        return largest * octav_clip(blocks, INTEGERS[form.number], per_channel=True).unsqueeze(1)

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
    around = torch.linspace(0.84, 1.16, 17, dtype=torch.float32, device=blocks.device)
    return largest * best(clip * around)


def _least_divergence(
    form: ScaledFormat, blocks: Tensor, inside: Tensor | None, largest: Tensor
) -> Tensor:
    """Return the clips [B, 1] whose rounding changes the distribution of magnitudes least
    (Migacz 2017, "8-bit inference with TensorRT").

    p: shares of magnitudes in bins up to a clip, all larger ones in the last bin. q: those that are
    within the clip, where the bins of one level share what it has evenly, as far as p is not 0.
    The divergence sum p log(p / q) is least among clips from an eighth of the largest value on.
    """
    numbers = (blocks.abs() * BINS).long().clamp_(max=BINS - 1)
    weights = torch.ones_like(blocks) if inside is None else inside.to(blocks.dtype)
    counts = blocks.new_zeros(len(blocks), BINS).scatter_add_(1, numbers, weights)
    best, least = torch.ones_like(largest), torch.full_like(largest, math.inf)
    for last in range(BINS // 8, BINS + 1, BINS // 64):
        kept, clip = counts[:, :last], last / BINS
        middles = (torch.arange(last, device=blocks.device) + 0.5) / BINS
        levels = form.number.decode(form.number.encode(middles * (form.number.largest / clip)))
        level = levels.unique(return_inverse=True)[1].expand(len(counts), -1)
        sums, bins = (
            torch.zeros_like(kept).scatter_add_(1, level, each).gather(1, level)
            for each in (kept, (kept > 0).to(kept.dtype))
        )
        q = torch.where(kept > 0, sums / bins.clamp(min=1), TINY_SHARE)
        p = kept.clone()
        p[:, -1] += counts[:, last:].sum(1)
        p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        divergence = torch.xlogy(p, p / q).sum(1, keepdim=True)
        better = divergence < least
        least, best = torch.where(better, divergence, least), torch.where(better, clip, best)
    return largest * best


NUMBER_FORMATS: dict[str, Callable[[], NumberFormat]] = {
    **{f"int{bits}": partial(integer, bits) for bits in range(2, 9)},
    "fp8-e4m3": fp8_e4m3,
    "fp8-e5m2": fp8_e5m2,
    "fp4-e2m1": fp4_e2m1,
    **{
        f"log{whole}.{fraction}": partial(logarithmic, whole, fraction)
        for whole, fraction in ((2, 1), (3, 0), (3, 2), (4, 1), (4, 3), (5, 2))
    },
    "nf4": nf4,
    **{
        f"lloyd{bits}-{source}": partial(lloyd_max, source, bits)
        for source in SOURCES
        for bits in range(1, 7)
    },
    "ternary": ternary,
}
"""Name -> function that makes the number format. Users declare more (lsq.quant.declared)."""
BUILT_IN = frozenset(NUMBER_FORMATS)
FLOAT32 = FloatScales(torch.float32)
SCALES: dict[str, FloatScales | PowerScales | ScaledFormat] = {
    "float32": FLOAT32,
    "bfloat16": FloatScales(torch.bfloat16),
    "e8m0": PowerScales(),
    "e4m3": ScaledFormat(name="e4m3", number=fp8_e4m3(), grain=Grain.TENSOR, scales=FLOAT32),
    "uint4": ScaledFormat(name="uint4", number=multiplier(4), grain=Grain.ROW, scales=FLOAT32),
    "uint6": ScaledFormat(name="uint6", number=multiplier(6), grain=Grain.ROW, scales=FLOAT32),
}
"""Name -> storage of scales: e4m3 has a float32 scale for the tensor, uint4 and uint6 for each
row."""
PRESETS = {
    "int8-tensor": "int8/tensor/float32",
    "int8-row": "int8/row/float32",
    "mxint8": "int8/group32/e8m0",
    "mxfp8-e4m3": "fp8-e4m3/group32/e8m0",
    "mxfp8-e5m2": "fp8-e5m2/group32/e8m0",
    "mxfp4": "fp4-e2m1/group32/e8m0",
    "nvfp4": "fp4-e2m1/group16/e4m3",
    "vsquant4": "int4/group16/uint4",
    "vsquant4-6": "int4/group16/uint6",
    "vsquant6": "int6/group16/uint6",
    "nf4-64": "nf4/group64/float32",
}
"""Preset -> its number, grain and scales."""


@cache
def scaled_format(name: str) -> ScaledFormat:
    """Return the format `name`: a preset, <number>/<grain> with float32 scales, or all three parts.
    Raises ValueError: a part is unknown; the message offers the nearest names."""
    if not isinstance(name, str):
        raise ValueError(
            f"a number format is called {name!r}; its name is a string, as {next(iter(PRESETS))!r}"
        )
    if name in NUMBER_FORMATS:
        raise ValueError(
            f"{name!r} does not say which values share a scale; give {name}/row, {name}/group32 or"
            " such"
        )
    preset, *more = name.split("/")
    if more and preset in PRESETS:
        raise ValueError(
            f"{name!r}: {preset} has its own grain and scales, it is {PRESETS[preset]}; leave"
            f" /{'/'.join(more)} out, "
            f"or give <number>/<grain>/<scales>, as {PRESETS[preset].partition('/')[0]}/row"
        )
    parts = all_parts(name).split("/")
    if len(parts) != 3:
        raise ValueError(
            f"no number format is called {name!r}{_meant(name)}; give one of {', '.join(PRESETS)},"
            " or <number>/<grain> or <number>/<grain>/<scales>, as int4/group16/uint4"
        )
    stored = parts[2]
    if stored not in SCALES:
        raise ValueError(
            f"{name!r}: no scales are called {stored!r}{_nearest(stored, SCALES)}; allowed:"
            f" {', '.join(SCALES)}"
        )
    return ScaledFormat(
        name=name, number=find_number(parts[0]), grain=grain(parts[1]), scales=SCALES[stored]
    )


def all_parts(name: str) -> str:
    """Return a format's name in three parts: int8-row and int8/row both become int8/row/float32.
    Other names stay."""
    written = PRESETS.get(name, name)
    return f"{written}/float32" if written.count("/") == 1 else written


@cache
def find_number(name: str) -> NumberFormat:
    """Return the number format `name` of NUMBER_FORMATS. Raises ValueError: there is none; the
    message offers the nearest names."""
    if name not in NUMBER_FORMATS:
        raise ValueError(
            f"no number is called {name!r}{_nearest(name, NUMBER_FORMATS)}; allowed:"
            f" {', '.join(NUMBER_FORMATS)}, and those that @lsq.number_format declares"
            " (on command lines: --import FILE) or lsq.models.declare_formats reads off a"
            " checkpoint"
        )
    return NUMBER_FORMATS[name]()


def _meant(name: str) -> str:
    """Suggest a format for an unknown name, which may have a dash instead of the slash."""
    number, _, grained = name.rpartition("-")
    try:
        grain(grained)
    except ValueError:
        number = ""
    if number in NUMBER_FORMATS:
        return f" (did you mean {number}/{grained}?)"
    return _nearest(name, (*PRESETS, *NUMBER_FORMATS))


def _nearest(name: str, allowed: Iterable[str]) -> str:
    found = difflib.get_close_matches(name.lower(), allowed, n=2)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def signal_to_noise(x: Tensor, found: Tensor) -> float:
    """Return 10 log10(sum of x^2 / sum of (x - found)^2), in decibels; both have the same shape.

    It is infinite if nothing differs, and NaN if a value is NaN or both sums are 0.
    """
    signal = float(x.double().square().sum())
    noise = float((x.double() - found.double()).square().sum())
    if noise == 0 or signal == 0:
        return math.inf if signal > 0 else math.nan if noise == 0 else -math.inf
    return 10 * math.log10(signal / noise)
