"""Reference arithmetic that the fused operations share: rounding to codes, reading products, rounding gradients.

Shapes: M rows, N columns. Codes are int8 [M, N]; `clipped` holds one bit an element, packed (lsq.quant.pack_bits);
`error` = (code - x / scale) / Q is kept only for clip_gradient="lsq".
"""

import math

import torch

from lsq import quant
from lsq.ops.random import uniform

GRADIENT_CODE = 127
"""Largest code of a rounded gradient; gradients are always 8 bits wide."""

SMALLEST_GRADIENT = 1e-35
"""A row (or column) of gradients whose largest magnitude lies below this is rounded to zero."""


def round_activation(x: torch.Tensor, clip: torch.Tensor, *, bits: int, error: bool):
    """(codes, scale [1], clipped, error or None) of float x [M, N] under clip [1]; see lsq.quant.quantize."""
    codes, scale, clipped = quant.quantize(x, clip, bits)
    return codes, scale, quant.pack_bits(clipped), _error(codes, x / quant.scale_of(clip, bits), clipped, bits, error)


def round_scaled(scaled: torch.Tensor, clip: torch.Tensor, *, bits: int, error: bool):
    """The same for values that are already divided by the scale, as the output of an integer product is."""
    largest = quant.maximum_code(bits)
    clipped = scaled.abs() > largest
    codes = scaled.clamp(-largest, largest).round().nan_to_num(nan=0.0).to(torch.int8)
    scale = quant.scale_of(clip, bits)
    scale = torch.where(scaled.isnan().any(), torch.full_like(scale, math.nan), scale)
    return codes, scale, quant.pack_bits(clipped), _error(codes, scaled, clipped, bits, error)


def _error(codes, scaled, clipped, bits, wanted):
    if not wanted:
        return None
    return torch.where(clipped, 0.0, (codes - scaled) / quant.maximum_code(bits))


def read_product(y: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Float values [M, N] of a product: int8 codes with scale [1], int32 sums with scale [N], or float as it is."""
    return y if scale is None else y.to(torch.float32) * scale


def straight_through(gradient, codes, clipped, error, *, bits: int):
    """Gradients (before the rounding [M, N], of the clip [1]) for `gradient` after it: STE with PACT or LSQ."""
    outside = quant.unpack_bits(clipped, gradient.numel()).view(gradient.shape)
    clip_gradient = torch.where(outside, gradient * codes.sign(), 0.0).sum()
    if error is not None:
        clip_gradient = clip_gradient + (gradient * error).sum()
        clip_gradient = clip_gradient * lsq_factor(gradient.numel(), bits)
    return torch.where(outside, 0.0, gradient), clip_gradient.reshape(1)


def lsq_factor(numel: int, bits: int) -> float:
    """Esser et al. 2020: the gradient of a step size is scaled by 1 / sqrt(numel * Q)."""
    return 1.0 / math.sqrt(numel * quant.maximum_code(bits))


def round_rows(gradient, factor, key, stream):
    """Round each row of gradient [M, N] * factor [N] to (codes int8 [M, N], scale float32 [M]) at random, without bias.

    The scale of a row that holds a NaN or an infinity is NaN, so that overflow stays visible.
    """
    scaled = gradient * factor
    scale, reciprocal = gradient_scale(scaled.abs().amax(dim=1))
    return _round_at_random(scaled * reciprocal[:, None], key, stream), scale


def round_columns(x, key, stream):
    """The same with one scale for each column: (codes int8 [M, N], scale float32 [N])."""
    scale, reciprocal = gradient_scale(x.abs().amax(dim=0))
    return _round_at_random(x * reciprocal, key, stream), scale


def gradient_scale(largest: torch.Tensor, code: int = GRADIENT_CODE):
    """(scale, reciprocal) for largest magnitudes, which become `code`: (0, 0) for vanishing ones, (NaN, 0) for
    non-finite ones."""
    # Division of or by a number would be rounded twice, as a reciprocal and a product: the former on CUDA, the latter
    # everywhere.
    codes = torch.full_like(largest, code)
    vanishing = largest < SMALLEST_GRADIENT
    finite = largest.isfinite()
    scale = torch.where(vanishing, 0.0, torch.where(finite, largest / codes, math.nan))
    reciprocal = torch.where(vanishing | ~finite, 0.0, codes / largest)
    return scale, reciprocal


def _round_at_random(scaled, key, stream):
    rounded = (scaled + uniform(key, stream, tuple(scaled.shape))).floor()
    return rounded.clamp(-GRADIENT_CODE, GRADIENT_CODE).nan_to_num(nan=0.0).to(torch.int8)
