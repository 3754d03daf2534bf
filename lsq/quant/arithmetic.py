"""Reference arithmetic of rounding: activations under a clip, gradients at random, and what both do
to gradients.

Shapes: M rows, N columns. Codes are int8 [M, N]; `clipped` holds one bit an element, packed
(rounding.pack_bits); `error` = (code - x / scale) / Q is kept only for clip_gradient="lsq".
"""

import math

import torch

from lsq.quant.formats import GRADIENT
from lsq.quant.random import uniform_rows
from lsq.quant.rounding import maximum_code, pack_bits, quantize, scale_of, unpack_bits

SMALLEST_GRADIENT = 1e-35
"""A row (or column) of gradients whose largest magnitude lies below this is rounded to zero."""


def round_activation(x: torch.Tensor, clip: torch.Tensor, *, bits: int, error: bool):
    """(codes, scale [1], clipped, error or None) of float x [M, N] under clip [1]; see
    rounding.quantize."""
    codes, scale, clipped = quantize(x, clip, bits)
    found = None
    if error:
        found = torch.where(clipped, 0.0, (codes - x / scale_of(clip, bits)) / maximum_code(bits))
    return codes, scale, pack_bits(clipped), found


def straight_through(gradient, codes, clipped, error, *, bits: int):
    """Gradients (before the rounding [M, N], of the clip [1]) for `gradient` after it: STE with
    PACT or LSQ."""
    outside = unpack_bits(clipped, gradient.numel()).view(gradient.shape)
    clip_gradient = torch.where(outside, gradient * codes.sign(), 0.0).sum()
    if error is not None:
        clip_gradient = clip_gradient + (gradient * error).sum()
        clip_gradient = clip_gradient * lsq_factor(gradient.numel(), bits)
    return torch.where(outside, 0.0, gradient), clip_gradient.reshape(1)


def lsq_factor(numel: int, bits: int) -> float:
    """Esser et al. 2020: the gradient of a step size is scaled by 1 / sqrt(numel * Q); 0 elements
    count as 1."""
    return 1.0 / math.sqrt(max(1, numel) * maximum_code(bits))


def round_rows(gradient, factor, key, subsequence, largest: int = GRADIENT.largest, bound=None):
    """Round each row of gradient [M, N] * factor [N] to (codes int8 [M, N], scale float32 [M]) at
    random, without bias.

    `largest`: the largest code. `bound` [M]: what becomes this code, or the largest magnitude of
    each row. The scale of
    a row for which that is NaN or an infinity is NaN: overflow stays visible.
    """
    scaled = gradient * factor
    scale, reciprocal = gradient_scale(
        scaled.abs().amax(dim=1) if bound is None else bound, largest
    )
    return _round_at_random(scaled * reciprocal[:, None], key, subsequence, largest), scale


def nearest_rows(x, largest: int = GRADIENT.largest):
    """Round each row of x [M, N] to the nearest (codes int8 [M, N], scale float32 [M]), with scales
    as `round_rows`."""
    scale, reciprocal = gradient_scale(x.abs().amax(dim=1), largest)
    return (x * reciprocal[:, None]).round().nan_to_num(nan=0.0).to(GRADIENT.storage), scale


def round_columns(x, key, subsequence, largest: int = GRADIENT.largest):
    """The same with one scale for each column: (codes int8 [M, N], scale float32 [N])."""
    magnitude = x.abs().amax(dim=0) if len(x) else x.new_zeros(x.shape[1:])
    scale, reciprocal = gradient_scale(magnitude, largest)
    return _round_at_random(x * reciprocal, key, subsequence, largest), scale


def gradient_scale(largest: torch.Tensor, code: int = GRADIENT.largest):
    """(scale, reciprocal) for largest magnitudes, which become `code`: (0, 0) for vanishing ones,
    (NaN, 0) for non-finite ones.
    """
    # Division of or by a number would be rounded twice, as a reciprocal and a product: the former
    # on CUDA, the latter everywhere.
    codes = torch.full_like(largest, code)
    vanishing = largest < SMALLEST_GRADIENT
    finite = largest.isfinite()
    scale = torch.where(vanishing, 0.0, torch.where(finite, largest / codes, math.nan))
    reciprocal = torch.where(vanishing | ~finite, 0.0, codes / largest)
    return scale, reciprocal


def _round_at_random(scaled, key, subsequence, largest):
    rounded = (scaled + uniform_rows(key, subsequence, *scaled.shape)).floor()
    return rounded.clamp(-largest, largest).nan_to_num(nan=0.0).to(GRADIENT.storage)
