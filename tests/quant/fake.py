"""The quantiser in floating point, differentiable: what codes and gradients are tested against."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lsq.quant import maximum_code, scale_of
from lsq.quant.arithmetic import _over_rows


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale in the scale's dtype; scale [1], or [R] for codes [R, ...]."""
    return codes.to(scale.dtype) * _over_rows(scale, codes)


def fake_quantize(x: Tensor, clip: Tensor, bits: int = 8, clip_gradient: str = "pact") -> Tensor:
    """Quantise and dequantise in floating point, differentiably: what int8 layers are tested
    against.

    With upstream gradient g, x gets g where |x| <= clip and 0 elsewhere. The clip gets sum(g *
    sign(x)) over |x| > clip under "pact"; "lsq" adds sum(g * (x_hat - x) / clip) over |x| <= clip
    and multiplies the whole by 1/sqrt(n * Q), n being the elements under one clip.

    Args:
        x: any shape and float dtype.
        clip: [1], or [R] for x [R, ...]; values that check_clip accepts.
        bits: width of the integers, 2 to 8.
        clip_gradient: "pact" or "lsq".

    Returns:
        x_hat: shape and dtype of x, NaN exactly where x is NaN.

    Raises:
        ValueError: `bits` is not allowed, or the shape of `clip` does not fit x.
    """
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
            slope = (
                torch.where(clipped, slope, (x_hat - x) / row_clip)
                * (elements * ctx.maximum) ** -0.5
            )
        of_clip = (gradient * slope).reshape(clip.numel(), -1).sum(1).to(clip.dtype)
        return gradient.masked_fill(clipped, 0), of_clip.view(clip.shape), None, None
