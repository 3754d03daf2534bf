"""Weights and moments of a training in 8 bits, without float copies of them.

A weight [N, K] is an int8 code, which products read, and perhaps an int8 remainder: with a scale
for each row, w = scale * (code + remainder / 254). Moments of Adam have a scale for each block of
256 columns of a row, and uint8 codes whose distances grow with their magnitudes: the first is
scale * ((c - 128) / 127)^2 with its sign, the root of the second is scale * (c / 255)^2. Everything
is rounded at random, without bias of the values themselves, so that changes below a step survive
on average: Adam changes the second moment by a thousandth, where a step of its codes is a
hundredth.
"""

import torch
from torch import Tensor

from lsq.quant.arithmetic import largest_clips
from lsq.quant.random import philox, uniform_rows

BLOCK = 256
"""Columns of a row whose moments share a scale."""
LARGEST = 127
PARTS = 2 * LARGEST
"""Steps of a remainder to one step of a code."""
WEIGHT, FIRST, SECOND = range(3)
"""Subsequences of the random numbers of a step."""
ZERO = 128
"""Code of a first moment of 0."""


def blocks_of(columns: int) -> int:
    return -(-columns // BLOCK)


def split_weight(
    values: Tensor,
    before: Tensor,
    *,
    remainder: bool,
    uniform: Tensor | float = 0.5,
    dither: Tensor | int = 64,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (codes int8 [N, K], remainders int8 [N, K] or None, scales float32 [N]) of a weight.

    A scale is the largest magnitude of its row over 127, rounded to 17 bits, so that 127 scales
    are exact. The largest value gets the code 127 or -127. So values that were joined are split
    into the same codes again.

    Args:
        values: float32 [N, K]. A row with NaN or infinity gets a scale of NaN.
        before: the scales [N] until now, which rows of zeros keep.
        remainder: whether to keep remainders.
        uniform: numbers in [0, 1) [N, K]; 0.5 rounds codes to the nearest.
        dither: numbers from 0 to 127, int32 [N]; 64 rounds scales to the nearest.
    """
    clip = largest_clips(values, before * LARGEST)
    bits = (clip / LARGEST).view(torch.int32)
    scale = ((bits + dither) & -0x80).view(torch.float32)
    finite = clip.isfinite()
    parts = PARTS if remainder else 1
    factor = torch.where(finite, parts / scale, 0.0)
    values, most = torch.where(finite[:, None], values, 0.0), LARGEST * parts
    whole = (values * factor[:, None] + uniform).floor().clamp(-most, most)
    whole = torch.where(values.abs() == clip[:, None], most * values.sign(), whole)
    scale = torch.where(finite, scale, torch.nan)
    if not remainder:
        return whole.to(torch.int8), None, scale
    codes = (whole * (1 / PARTS)).round()
    return codes.to(torch.int8), (whole - codes * PARTS).to(torch.int8), scale


def join_weight(codes: Tensor, remainder: Tensor | None, scale: Tensor) -> Tensor:
    """Return the values float32 [N, K] of `split_weight`."""
    if remainder is None:
        return codes * scale[:, None]
    return codes * scale[:, None] + remainder * (scale * (1 / PARTS))[:, None]


def encode_first(values: Tensor, uniform: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [N, K], scales float32 [N, blocks]) of a first moment [N, K]."""
    scale = _largest(values)
    squares = _squares(values.abs(), scale, LARGEST)
    below = squares.sqrt().floor()
    share = (squares - below * below) / (2 * below + 1)
    code = (below + (share + uniform).floor()).clamp(max=LARGEST)
    return (ZERO + torch.where(values < 0, -code, code)).to(torch.uint8), scale


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    code = codes.to(torch.float32) - ZERO
    return code * code.abs() * _spread(scale * (1 / LARGEST**2), codes.shape[1])


def encode_second(roots: Tensor, uniform: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [N, K], scales float32 [N, blocks]) of the roots [N, K] of a second
    moment. A root above 0 keeps a code above 0, since Adam divides by it."""
    scale = _largest(roots)
    squares = _squares(roots, scale, 255)
    below = squares.sqrt().floor()
    lower, upper = below * below, (below + 1) * (below + 1)
    share = (squares * squares - lower * lower) / (upper * upper - lower * lower)
    code = (below + (share + uniform).floor()).clamp(max=255)
    return torch.where(roots > 0, code.clamp(min=1), code).to(torch.uint8), scale


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the roots float32 [N, K]."""
    code = codes.to(torch.float32)
    return code * code * _spread(scale * (1 / 255**2), codes.shape[1])


def dither_of(key: Tensor, rows: int) -> Tensor:
    """Return the numbers [N] that round the scales of a weight in a step: low bits of the words
    whose high bits round its codes."""
    return (philox(int(key), WEIGHT, rows) & 0x7F).to(torch.int32)


def uniform_numbers(key: Tensor, subsequence: int, like: Tensor) -> Tensor:
    """Return the numbers [N, K] that round a matrix [N, K] in a step with a key int64 [1]."""
    return uniform_rows(key, subsequence, *like.shape)


def _largest(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block: [N, K] -> [N, blocks]."""
    columns = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, blocks_of(columns) * BLOCK - columns))
    return padded.abs().view(len(values), -1, BLOCK).amax(2)


def _spread(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, 1)[:, :columns]


def _squares(magnitudes: Tensor, scale: Tensor, most: int) -> Tensor:
    """Return magnitudes [N, K] as squares of codes up to `most`; 0 in blocks without a scale."""
    usable = (scale > 0) & scale.isfinite()
    factor = torch.where(usable, torch.full_like(scale, most * most) / scale, 0.0)
    factor = _spread(factor, magnitudes.shape[1])
    return torch.where(factor > 0, magnitudes, 0.0) * factor
