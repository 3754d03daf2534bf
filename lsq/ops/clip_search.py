"""The clip of least squared error of any format, found by rounding under several clips: R rows, N
values in each."""

import torch

from lsq.ops.fake_quantize import FakeQuantize
from lsq.program.backend import Backend
from lsq.quant import SMALLEST_CLIP, fill_empty
from lsq.quant.numbers import Grain, ScaledFormat

FIRST, LEAST, TRIED, NEAR = 1.0, -6.0, 15, 9
"""Clips that are tried: the largest magnitude times 15 powers of two from FIRST down to LEAST; 9
around the best."""
SAMPLE = 65536
"""Values that are looked at of a tensor with one clip, about: whole rows."""


def least_error_clip(
    form: ScaledFormat, x: torch.Tensor, target: Backend, *, per_row: bool
) -> torch.Tensor:
    """Clips float32 [R], or [1], of float32 x [R, N] without NaN and infinities, rounded on a
    backend.

    Each is the largest magnitude of what shares it, times the best of 15 powers of two in equal
    steps and then of 9
    around that: clips above the largest magnitude pay for formats that are coarse at their upper
    end, and so are tried where the clip says the scale.
    """
    if not per_row:
        x = x[:: max(1, x.numel() // SAMPLE)].contiguous()
    given = form.grain.columns is None if per_row else form.grain == Grain.TENSOR
    largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax().view(1, 1)
    out = torch.empty_like(x)

    def error(clip: torch.Tensor) -> torch.Tensor:
        limit = clip.flatten().clamp(min=SMALLEST_CLIP)
        target.run(FakeQuantize(x=x, clip=limit, out=out, form=form, given=given))
        squares = (out - x).square_()
        return squares.sum(1, keepdim=True) if per_row else squares.sum().view(1, 1)

    def best(clips: list[torch.Tensor]) -> torch.Tensor:
        errors = torch.cat([error(clip) for clip in clips], dim=1)
        return torch.cat(clips, dim=1).gather(1, errors.argmin(1, keepdim=True))

    first = FIRST if given else 0.0
    step = (first - LEAST) / (TRIED - 1)
    found = best([largest * 2 ** (first - step * i) for i in range(TRIED)])
    parts = [2 ** (step * (1 - 2 * i / (NEAR - 1))) for i in range(NEAR)]
    found = best([torch.minimum(found * part, largest * 2**first) for part in parts])
    return fill_empty(found.flatten().clamp(min=SMALLEST_CLIP))
