"""What the backward of every operation that reads a product does with its gradient, and the reading itself.

A product y [M, N] is int8 codes with scale [1] (and clipped bits), int32 sums with scale [N], or float32. Its
gradient leaves masked by its clipped bits, as float32, or rounded per row under backward="int8".
"""

import torch

from lsq import quant
from lsq.ops import rounding


def finish(gradient, codes, clipped, error, weight_scale, key, *, bits, stream=None):
    """Reference: gradient [M, N] of the values read -> (gradient or codes, row scale or None, dclip [1] or None)."""
    dclip = None
    if clipped is not None:
        gradient, dclip = rounding.straight_through(gradient, codes, clipped, error, bits=bits)
    if stream is None:
        return gradient, None, dclip
    codes, row_scale = rounding.round_rows(gradient, weight_scale, key, stream)
    return codes, row_scale, dclip


def arguments(y, y_scale, clipped, error, bits):
    """What the C++ loops want to know of a product: pointers, type (0 int8, 1 int32, 2 float32), LSQ factor."""
    kind = {torch.int8: 0, torch.int32: 1, torch.float32: 2}[y.dtype]
    factor = 1.0 if error is None else rounding.lsq_factor(y.numel(), bits)
    return y, kind, y_scale, clipped, error, factor


def round_or_keep(values, clip, *, bits, error):
    """Reference: float values -> (codes, scale, clipped, error), or (values, None, None, None) without a clip."""
    if clip is None:
        return values, None, None, None
    return rounding.round_activation(values, clip, bits=bits, error=error)


def largest_code(clip, bits):
    """Q where there is a clip, else 0."""
    return quant.maximum_code(bits) if clip is not None else 0
