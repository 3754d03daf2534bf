"""The quantiser: tensors to symmetric n-bit integers and back, and how the clip range is found and learned.

A clip c > 0 becomes the scale s = c/Q with Q = 2^(bits-1) - 1, and x becomes q = rint(clamp(x/s, -Q, Q)),
rounded half to even; x_hat = q*s. One clip belongs to a whole tensor (clips of shape [1]) or to one row x[i]
of it (clips of shape [R]; the rows of a weight are its output channels). Formulas: docs/numbers.md.

Methods: PACT (Choi et al. 2018, arXiv:1805.06085) and LSQ (Esser et al. 2020, arXiv:1902.08153) for the
gradient of the clip; the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432) for the gradient
of x; OCTAV (Sakr et al. 2022, arXiv:2206.06501) for the clip of least squared error.

Shapes: R rows, N elements in one row, K candidate clips.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CLIP_GRADIENTS = ("pact", "lsq")
"""How clips learn."""
SMALLEST_CLIP = 2.0**-40
"""Clips below this are refused and calibration never returns less, so that no scale is 0 or denormal."""
LARGEST_CLIP = 2.0**40
"""Clips above this are refused: no network that learns has such values, and products of scales would overflow soon."""


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
        ValueError: an element of `clip` is NaN, below SMALLEST_CLIP or above LARGEST_CLIP; the message calls it `name`.
    """
    unusable = clip[~((clip >= SMALLEST_CLIP) & (clip <= LARGEST_CLIP))]
    if unusable.numel():
        raise ValueError(
            f"{name} is {unusable[0].item()!r} ({unusable.numel()} of {clip.numel()} values are unusable); a "
            f"clip must be finite, from {SMALLEST_CLIP} to {LARGEST_CLIP}: calibrate again or load a sound checkpoint"
        )


def quantize(x: Tensor, clip: Tensor, bits: int = 8) -> Quantized:
    """Round x to codes.

    Args:
        x: any shape and float dtype; x/scale is computed in the wider of its dtype and the scale's.
        clip: [1], or [R] for x [R, ...]; values that check_clip accepts.
        bits: width of the integers, 2 to 8.

    Raises:
        ValueError: the shape of `clip` does not fit x.
    """
    maximum = maximum_code(bits)
    scale = scale_of(clip, bits)
    codes = (x / _over_rows(scale, x)).clamp_(-maximum, maximum).round_()
    missing = torch.isnan(codes)
    if missing.any():
        codes.masked_fill_(missing, 0)
        scale = scale.masked_fill(missing.reshape(scale.numel(), -1).any(1), math.nan)
    return Quantized(codes.to(torch.int8), scale, x.abs() > _over_rows(clip, x))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale in the scale's dtype; scale [1], or [R] for codes [R, ...]."""
    return codes.to(scale.dtype) * _over_rows(scale, codes)


def fake_quantize(x: Tensor, clip: Tensor, bits: int = 8, clip_gradient: str = "pact") -> Tensor:
    """Quantise and dequantise in floating point, differentiably: the reference for the int8 layers.

    With upstream gradient g, x gets g where |x| <= clip and 0 elsewhere. The clip gets sum(g * sign(x)) over
    |x| > clip under "pact"; "lsq" adds sum(g * (x_hat - x) / clip) over |x| <= clip and multiplies the whole
    by 1/sqrt(n * Q), n being the elements under one clip.

    Args:
        x: any shape and float dtype.
        clip: [1], or [R] for x [R, ...]; values that check_clip accepts.
        bits: width of the integers, 2 to 8.
        clip_gradient: "pact" or "lsq".

    Returns:
        x_hat: shape and dtype of x, NaN exactly where x is NaN.

    Raises:
        ValueError: `clip_gradient` or `bits` is not allowed, or the shape of `clip` does not fit x.
    """
    if clip_gradient not in CLIP_GRADIENTS:
        raise ValueError(f"clip_gradient is {clip_gradient!r}; allowed: {', '.join(map(repr, CLIP_GRADIENTS))}")
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
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        x, clip, x_hat = ctx.saved_tensors
        row_clip = _over_rows(clip, x)
        clipped = x.abs() > row_clip
        slope = torch.where(clipped, x.sign(), 0).to(torch.promote_types(x.dtype, clip.dtype))
        if x_hat is not None:
            elements = max(x.numel() // clip.numel(), 1)
            slope = torch.where(clipped, slope, (x_hat - x) / row_clip) * (elements * ctx.maximum) ** -0.5
        of_clip = (gradient * slope).reshape(clip.numel(), -1).sum(1).to(clip.dtype)
        return gradient.masked_fill(clipped, 0), of_clip.view(clip.shape), None, None


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
        raise ValueError(f"{numel} bits take {-(-numel // 8)} bytes, but packed holds {packed.numel()}")
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
