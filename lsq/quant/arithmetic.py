"""The arithmetic of rounding, in plain PyTorch.

A clip c > 0 gives the scale s = c/Q with Q = 2^(bits-1) - 1. Then x becomes q = rint(clamp(x/s, -Q,
Q)), rounded half to even, and x_hat = q*s. One clip belongs to a whole tensor (clips of shape [1])
or to one row x[i] (clips of shape [R]; the rows of a weight are its output channels). Gradients
have no clips: they are rounded at random under their largest magnitudes. Formulas: docs/numbers.md.

R: rows of a tensor; M, N: rows and columns of a matrix.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lsq.quant.random import uniform_rows

CLIP_GRADIENTS = ("pact", "lsq")
"""Gradients of clips: PACT (Choi et al. 2018, arXiv:1805.06085) or LSQ (Esser et al. 2020,
arXiv:1902.08153)."""
SMALLEST_CLIP = 2.0**-40
"""Clips below this are refused, and calibration never returns less: no scale is 0 or denormal."""
LARGEST_CLIP = 2.0**40
"""Clips above this are refused. No network that learns has such values, and products of scales
would soon overflow."""

SMALLEST_GRADIENT = 1e-35
"""A row (or column) of gradients becomes 0 if its largest magnitude is below this."""
LARGEST = 127
"""Largest code of gradients, unless a format says otherwise."""


class Quantized(NamedTuple):
    """A tensor as integers: its values are codes * scale, with one scale or one for each row."""

    codes: Tensor
    """int8, the shape of x, from -Q to Q; 0 where x is NaN."""
    scale: Tensor
    """[1] or [R], clip/Q; NaN where the tensor or row holds a NaN: its values become NaN."""
    clipped: Tensor
    """bool, the shape of x: |x| > clip."""


def maximum_code(bits: int) -> int:
    """Return the largest code Q = 2^(bits-1) - 1; the smallest is -Q. Raises ValueError: `bits` is
    not a whole number from 2 to 8."""
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; it must be a whole number from 2 to 8")
    return 2 ** (bits - 1) - 1


def scale_of(clip: Tensor, bits: int = 8) -> Tensor:
    """Return the value of one code, clip/Q, shaped as `clip`; float64 for float64, else float32."""
    dtype = torch.float64 if clip.dtype == torch.float64 else torch.float32
    return clip.to(dtype) / maximum_code(bits)


def check_clip(clip: Tensor, name: str) -> None:
    """Raise ValueError, with `name`, for a clip not from SMALLEST_CLIP to LARGEST_CLIP, or NaN."""
    unusable = clip[~((clip >= SMALLEST_CLIP) & (clip <= LARGEST_CLIP))]
    if unusable.numel():
        raise ValueError(
            f"{name} is {unusable[0].item()!r} ({unusable.numel()} of {clip.numel()} values are"
            f" unusable); a clip must be finite, from {SMALLEST_CLIP} to {LARGEST_CLIP}: calibrate"
            " again or load a sound checkpoint"
        )


def largest_clips(rows: Tensor, before: Tensor) -> Tensor:
    """Return the largest magnitude of each row [R, N] as its clip [R], at least SMALLEST_CLIP.

    A row of zeros keeps its clip `before` [R], or gets 1 if that is not finite. Gradients carry the
    scales of rows, so a tiny clip would make the gradient of its row vanish.
    """
    largest = rows.detach().float().abs().amax(1)
    return torch.where(
        largest == 0, torch.where(before.isfinite(), before, 1.0), largest.clamp(min=SMALLEST_CLIP)
    )


def mean_clips(rows: Tensor, before: Tensor) -> Tensor:
    """Return the mean magnitude of each row [R, N] as its clip [R], or of all as one clip [1]:
    `before` has one or the other shape. As its scale it makes ternary codes (Ma et al. 2024,
    arXiv:2402.17764). A mean of 0, or one that is not finite, keeps the clip `before`."""
    mean = rows.detach().float().abs().mean(1)
    if before.numel() == 1:
        mean = mean.mean(0, keepdim=True)
    before = torch.where(before.isfinite(), before, 1.0)
    return torch.where((mean > 0) & mean.isfinite(), mean.clamp(min=SMALLEST_CLIP), before)


def quantize(x: Tensor, clip: Tensor, bits: int = 8) -> Quantized:
    """Round x, of any shape and float dtype, to codes under clip [1], or [R] for x [R, ...].

    x/scale is computed in the wider dtype. Raises ValueError: the shape of `clip` does not fit x.
    """
    maximum = maximum_code(bits)
    scale = scale_of(clip, bits)
    codes = (x / _over_rows(scale, x)).clamp_(-maximum, maximum).round_()
    missing = torch.isnan(codes)
    if missing.any():
        codes.masked_fill_(missing, 0)
        scale = scale.masked_fill(missing.reshape(scale.numel(), -1).any(1), math.nan)
    return Quantized(codes.to(torch.int8), scale, x.abs() > _over_rows(clip, x))


def pack_bits(mask: Tensor) -> Tensor:
    """Pack bool, any shape, into uint8 [ceil(numel/8)]: element i is bit i%8 of byte i//8."""
    flat = mask.flatten().to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(
        1, dtype=torch.uint8
    )


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Invert pack_bits: uint8 [ceil(numel/8)] -> bool [numel]. Raises ValueError: `packed` holds
    another number of bytes."""
    if packed.numel() != -(-numel // 8):
        raise ValueError(
            f"{numel} bits take {-(-numel // 8)} bytes, but packed holds {packed.numel()}"
        )
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).bool().flatten()[:numel]


def _over_rows(values: Tensor, x: Tensor) -> Tensor:
    """View values [1] or [R] so that they broadcast over x [R, ...]."""
    if values.numel() == 1:
        return values.reshape(1)
    if values.shape != x.shape[:1]:
        raise ValueError(
            f"clip or scale of shape {list(values.shape)} does not fit x of shape {list(x.shape)}; "
            f"give it shape [1] or {list(x.shape[:1])}"
        )
    return values.view(-1, *[1] * (x.dim() - 1))


def round_activation(x: Tensor, clip: Tensor, *, bits: int, error: bool):
    """Round x [M, N] under clip [1]: (codes, scale [1], packed `clipped`, error or None)."""
    codes, scale, clipped = quantize(x, clip, bits)
    kept = None
    if error:
        kept = torch.where(clipped, 0.0, (codes - x / scale_of(clip, bits)) / maximum_code(bits))
    return codes, scale, pack_bits(clipped), kept


def straight_through(gradient, codes, clipped, error, *, bits: int):
    """Return the gradients (before the rounding [M, N], of the clip [1]) by the straight-through
    estimator with PACT or LSQ; `gradient` is that after the rounding."""
    outside = unpack_bits(clipped, gradient.numel()).view(gradient.shape)
    clip_gradient = torch.where(outside, gradient * codes.sign(), 0.0).sum()
    if error is not None:
        clip_gradient = clip_gradient + (gradient * error).sum()
        clip_gradient = clip_gradient * lsq_factor(gradient.numel(), bits)
    return torch.where(outside, 0.0, gradient), clip_gradient.reshape(1)


def lsq_factor(numel: int, bits: int) -> float:
    """Return 1 / sqrt(numel * Q), the factor of a step size's gradient (Esser et al. 2020); 0
    elements count as 1."""
    return 1.0 / math.sqrt(max(1, numel) * maximum_code(bits))


def round_rows(gradient, factor, key, subsequence, largest: int = LARGEST, bound=None):
    """Round each row of gradient [M, N] * factor [N] at random, without bias.

    Returns (codes int8 [M, N], scale float32 [M]). `largest`: the largest code. `bound` [M]: the
    magnitudes that become this code; default: the largest of each row. Where that is NaN or
    infinite, the scale is NaN: overflow stays visible.
    """
    scaled = gradient * factor
    scale, reciprocal = gradient_scale(
        scaled.abs().amax(dim=1) if bound is None else bound, largest
    )
    return _round_at_random(scaled * reciprocal[:, None], key, subsequence, largest), scale


def nearest_rows(x, largest: int = LARGEST):
    """Round each row of x [M, N] to the nearest codes: (codes int8 [M, N], scale float32 [M])."""
    scale, reciprocal = gradient_scale(x.abs().amax(dim=1), largest)
    return (x * reciprocal[:, None]).round().nan_to_num(nan=0.0).to(torch.int8), scale


def round_columns(x, key, subsequence, largest: int = LARGEST):
    """Round columns of x [M, N] as `round_rows` rows: (codes int8 [M, N], scale float32 [N])."""
    magnitude = x.abs().amax(dim=0) if len(x) else x.new_zeros(x.shape[1:])
    scale, reciprocal = gradient_scale(magnitude, largest)
    return _round_at_random(x * reciprocal, key, subsequence, largest), scale


def gradient_scale(largest: Tensor, code: int = LARGEST):
    """Return (scale, reciprocal) by which the magnitudes `largest` become `code`: (0, 0) for
    vanishing magnitudes, (NaN, 0) for those that are not finite."""
    # Division by a Python number (on CUDA), or of one (everywhere), would round twice: PyTorch
    # multiplies by a reciprocal. So both operands are tensors.
    codes = torch.full_like(largest, code)
    vanishing = largest < SMALLEST_GRADIENT
    finite = largest.isfinite()
    scale = torch.where(vanishing, 0.0, torch.where(finite, largest / codes, math.nan))
    reciprocal = torch.where(vanishing | ~finite, 0.0, codes / largest)
    return scale, reciprocal


def _round_at_random(scaled, key, subsequence, largest):
    rounded = (scaled + uniform_rows(key, subsequence, *scaled.shape)).floor()
    return rounded.clamp(-largest, largest).nan_to_num(nan=0.0).to(torch.int8)
