"""Measuring clips: lsq.quant.calibrate with the search for the least squared error in C++."""

import torch

from lsq import quant
from lsq.csrc import loader


def calibrate(x: torch.Tensor, method: str, bits: int, per_channel: bool = False, **options) -> torch.Tensor:
    """As lsq.quant.calibrate, many times faster for "mse" on float32 tensors of the CPU."""
    return quant.calibrate(x, method, bits, per_channel, least_error=least_error_clip, **options)


def least_error_clip(x: torch.Tensor, bits: int, per_channel: bool = False) -> torch.Tensor:
    """As lsq.quant.octav_clip: float32 [1] or, per channel, [R]."""
    if not loader.available() or x.dtype != torch.float32 or x.device.type != "cpu":
        return quant.octav_clip(x, bits, per_channel)
    rows = x.detach().reshape(len(x) if per_channel else 1, -1).contiguous()
    clip = torch.empty(len(rows))
    loader.call(
        "lsq_least_error_clip", rows, len(rows), rows.shape[1], quant.sample_stride(rows.shape[1]),
        quant.maximum_code(bits), quant.SMALLEST_CLIP, clip,
    )
    return clip
