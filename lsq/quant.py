"""The quantiser: floating-point tensors to symmetric n-bit integers and back, and how its clip range is found and learned.

A clip c > 0 becomes the scale s = c/Q with Q = 2^(bits-1) - 1, and x becomes q = rint(clamp(x/s, -Q, Q)), rounded half to
even; x_hat = q*s. A clip belongs to a whole tensor (shape [1]) or to one row of it (shape [R], R = x.shape[0]: the output
channels of a weight). Formulas and reasons: docs/numbers.md.

Methods: PACT (Choi et al. 2018, arXiv:1805.06085) and LSQ (Esser et al. 2020, arXiv:1902.08153) for the gradient of the
clip; the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432) for the gradient of x; OCTAV (Sakr et al. 2022,
arXiv:2206.06501) for the clip of least squared error.

Shapes: R rows (output channels), N elements of one row, K candidate clips.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lsq.config import CALIBRATIONS, CLIP_GRADIENTS

SMALLEST_CLIP = 1e-12
"""Clips below this are refused, and calibration never returns less: an all-zero tensor gets exactly this clip."""


class Quantized(NamedTuple):
    """A tensor as integers; dequantize(codes, scale) gives its values back."""

    codes: Tensor
    """int8, the shape of x, from -Q to Q; 0 where x is NaN."""
    scale: Tensor
    """[1] or [R], clip/Q; NaN for a tensor or row that holds a NaN, so that its values come back as NaN."""
    clipped: Tensor
    """bool, the shape of x: |x| > clip."""


def maximum_code(bits: int) -> int:
    """Largest code Q = 2^(bits-1) - 1; the smallest is -Q.

    Raises:
        ValueError: `bits` is not a whole number from 2 to 8.
    """
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; it must be a whole number from 2 to 8")
    return 2 ** (bits - 1) - 1


def scale_of(clip: Tensor, bits: int = 8) -> Tensor:
    """Value of one code, clip/Q: the shape of `clip`; float64 for float64 clips, otherwise float32."""
    dtype = torch.float64 if clip.dtype == torch.float64 else torch.float32
    return clip.to(dtype) / maximum_code(bits)


def check_clip(clip: Tensor, name: str) -> None:
    """Refuse clips that cannot be used.

    Raises:
        ValueError: an element of `clip`, called `name` in the message, is NaN, infinite or below SMALLEST_CLIP.
    """
    usable = torch.isfinite(clip) & (clip >= SMALLEST_CLIP)
    if not usable.all():
        unusable = clip[~usable]
        raise ValueError(
            f"{name} holds {unusable[0].item()!r} ({unusable.numel()} of {clip.numel()} values are unusable); "
            f"a clip must be finite and at least {SMALLEST_CLIP}; calibrate it anew or load another checkpoint"
        )


def quantize(x: Tensor, clip: Tensor, bits: int = 8) -> Quantized:
    """Round x to codes.

    Args:
        x: any shape and float dtype; x/scale is computed in the wider of its dtype and float32.
        clip: [1], or [R] for x [R, ...]; must be one that check_clip accepts.
        bits: width of the integers, 2 to 8.

    Raises:
        ValueError: the shape of `clip` does not fit x.
    """
    maximum = maximum_code(bits)
    scale = scale_of(clip, bits)
    ratio = (x / _over_rows(scale, x)).clamp_(-maximum, maximum).round_()
    missing = torch.isnan(ratio)
    if missing.any():
        ratio.masked_fill_(missing, 0)
        poisoned = missing.any() if scale.numel() == 1 else missing.flatten(1).any(1)
        scale = scale.masked_fill(poisoned, math.nan)
    return Quantized(ratio.to(torch.int8), scale, x.abs() > _over_rows(clip, x))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale in the scale's dtype; scale [1], or [R] for codes [R, ...]."""
    return codes.to(scale.dtype) * _over_rows(scale, codes)


def fake_quantize(x: Tensor, clip: Tensor, bits: int = 8, clip_gradient: str = "pact") -> Tensor:
    """Quantise and dequantise in floating point, differentiably: the reference of everything that int8 layers do.

    Gradients for upstream g: x gets g where |x| <= clip and 0 elsewhere; clip gets sum(g * sign(x)) over |x| > clip
    under "pact". "lsq" adds sum(g * (x_hat - x) / clip) over |x| <= clip and multiplies the whole by
    1/sqrt(numel * Q), numel being the elements under one clip.

    Args:
        x: any shape and float dtype.
        clip: [1], or [R] for x [R, ...].
        bits: width of the integers, 2 to 8.
        clip_gradient: "pact" or "lsq".

    Returns:
        x_hat, shape and dtype of x. NaN where x is NaN.

    Raises:
        ValueError: `clip_gradient` or `bits` is not allowed, or the shape of `clip` does not fit x.
    """
    if clip_gradient not in CLIP_GRADIENTS:
        raise ValueError(
            f"clip_gradient is {clip_gradient!r}; allowed: {', '.join(map(repr, CLIP_GRADIENTS))}"
        )
    return _FakeQuantize.apply(x, clip, bits, clip_gradient)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, clip: Tensor, bits: int, clip_gradient: str) -> Tensor:
        maximum = maximum_code(bits)
        scale = _over_rows(scale_of(clip, bits), x)
        x_hat = ((x / scale).clamp_(-maximum, maximum).round_() * scale).to(x.dtype)
        ctx.save_for_backward(x, clip, x_hat if clip_gradient == "lsq" else None)
        ctx.maximum = maximum
        return x_hat

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, clip, x_hat = ctx.saved_tensors
        row_clip = _over_rows(clip, x)
        clipped = x.abs() > row_clip
        slope = torch.where(clipped, x.sign(), 0)
        if x_hat is not None:
            share = (x.numel() // clip.numel() * ctx.maximum) ** -0.5
            slope = share * torch.where(clipped, slope, (x_hat - x) / row_clip)
        clip_gradient = (gradient * slope).to(clip.dtype)
        clip_gradient = clip_gradient.sum() if clip.numel() == 1 else clip_gradient.flatten(1).sum(1)
        return gradient.masked_fill(clipped, 0), clip_gradient.view(clip.shape), None, None


def calibrate(
    x: Tensor,
    method: str,
    bits: int = 8,
    per_channel: bool = False,
    *,
    fixed: float | None = None,
    percentile: float = 99.99,
) -> Tensor:
    """First clip of a tensor, measured on a sample of it.

    Args:
        x: any shape and float dtype, finite.
        method: "fixed", "absmax" (largest |x|), "percentile" or "mse" (least squared error, see octav_clip).
        bits: width of the integers, 2 to 8; matters to "mse" only.
        per_channel: one clip per row x[i] instead of one for all of x.
        fixed: the clip under "fixed", which does not look at the values of x.
        percentile: under "percentile", the share of |x| in percent that the clip leaves inside.

    Returns:
        float32 [1] or [R], at least SMALLEST_CLIP; exactly SMALLEST_CLIP where all of x is zero.

    Raises:
        ValueError: `method` is unknown, `fixed` is missing, or x is empty or holds NaN or infinity.
    """
    if method not in CALIBRATIONS:
        raise ValueError(f"calibration method is {method!r}; allowed: {', '.join(map(repr, CALIBRATIONS))}")
    rows = x.detach().abs().flatten(1) if per_channel else x.detach().abs().reshape(1, -1)
    if method == "fixed":
        if fixed is None:
            raise ValueError('calibration method "fixed" needs the clip: pass fixed=<a number above 0>')
        clip = torch.full((len(rows),), fixed, device=x.device)
        check_clip(clip, "fixed")
        return clip
    if rows.numel() == 0 or not torch.isfinite(rows.sum()):
        _refuse_sample(x)
    if method == "absmax":
        clip = rows.amax(1)
    elif method == "percentile":
        inside = math.ceil(rows.shape[1] * percentile / 100 - 1e-9)
        clip = rows.kthvalue(max(inside, 1), dim=1).values
    else:
        clip = octav_clip(rows, bits, per_channel=True)
    return clip.float().clamp(min=SMALLEST_CLIP)


def octav_clip(x: Tensor, bits: int = 8, per_channel: bool = False) -> Tensor:
    """Clip of least squared error."""
    maximum = maximum_code(bits)
    rows = x.detach().abs().flatten(1) if per_channel else x.detach().abs().reshape(1, -1)
    largest = rows.amax(1, keepdim=True)
    rows = rows.float() / largest.clamp(min=SMALLEST_CLIP)
    nonzero = (rows > 0).sum(1, keepdim=True)
    clip = rows.sum(1, keepdim=True) / nonzero.clamp(min=1)
    for _ in range(30):
        above = rows > clip
        count = above.sum(1, keepdim=True)
        total = (rows * above).sum(1, keepdim=True)
        clip = total / ((nonzero - count) / (12 * maximum**2) + count).clamp(min=1e-30)
    return (clip * largest).squeeze(1).clamp(min=SMALLEST_CLIP)


def pack_bits(mask: Tensor) -> Tensor:
    """bool, any shape -> uint8 [ceil(numel/8)]: element i of the flattened mask is bit i%8 of byte i//8."""
    flat = mask.flatten().to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Inverse of pack_bits: uint8 [ceil(numel/8)] -> bool [numel].

    Raises:
        ValueError: `packed` does not hold exactly ceil(numel/8) bytes.
    """
    if packed.numel() != -(-numel // 8):
        raise ValueError(
            f"{numel} bits are packed in {-(-numel // 8)} bytes, but packed holds {packed.numel()}"
        )
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).bool().flatten()[:numel]


def _over_rows(values: Tensor, x: Tensor) -> Tensor:
    """View [1] or [R] values so that they broadcast over x [R, ...]."""
    if values.numel() == 1:
        return values.reshape(1)
    if x.dim() == 0 or values.shape != x.shape[:1]:
        raise ValueError(
            f"clip or scale has shape {list(values.shape)} for x of shape {list(x.shape)}; use [1] or [{len(x)}]"
        )
    return values.view(-1, *[1] * (x.dim() - 1))


def _refuse_sample(x: Tensor) -> None:
    """Say why x cannot be calibrated on."""
    if x.numel() == 0:
        raise ValueError(f"cannot calibrate on an empty tensor of shape {list(x.shape)}; give at least one value")
    count = x.numel() - int(torch.isfinite(x).sum())
    if count:
        raise ValueError(f"cannot calibrate on {count} non-finite values of {x.numel()}; find where they come from")
