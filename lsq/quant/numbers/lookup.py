"""How loops and kernels find the nearest value of a number format: by the upper half of a float's
bits.

All floats that share their upper 16 bits (sign, exponent, 7 bits of the mantissa) lie within a part
in 128 of each other. Formats whose boundaries are rarer than that need one comparison more.
"""

from functools import cache

import torch
from torch import Tensor

from lsq.quant.numbers.number import NumberFormat, boundaries_of

RANKS, LEVELS = 65536 + 64, 256
"""Bytes in which ranks lie, with room for reads past them, and how many floats each of the two
lists behind has."""


@cache
def lookup(number: NumberFormat, device: torch.device) -> Tensor:
    """Bytes uint8 [RANKS + 8 * LEVELS] on a device, the same memory each time.

    First the number of boundaries below all floats with these upper bits, a byte for each of
    65,536; then boundaries and values float32 [LEVELS], in order, filled up with infinity and the
    largest value. A float x whose bits give rank r has value r, or value r + 1 where it lies above
    boundary r.

    Raises:
        ValueError: two boundaries of the format lie so close that floats with the same upper bits
            are on both sides.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        boundaries, codes, _ = boundaries_of(number.values)
        upper = torch.arange(65536, dtype=torch.int64) << 16
        ends = torch.stack([upper, upper | 0xFFFF])
        floats = torch.where(ends >= 2**31, ends - 2**32, ends).to(torch.int32).view(torch.float32)
        ranks = torch.bucketize(floats, boundaries)
        # infinity has no other beside it
        low, high = ranks.where(floats[1].isfinite(), ranks[0]).aminmax(dim=0)
        if (high - low).max() > 1:
            raise ValueError(
                f"boundaries between values of {number.name} lie closer than a part in 128: loops"
                " cannot round to it"
            )
        values = torch.tensor(number.values, dtype=torch.float32)[codes.int()]
        table = torch.zeros(RANKS + 8 * LEVELS, dtype=torch.uint8)
        table[:65536] = low.to(torch.uint8)
        lists = table[RANKS:].view(torch.float32).view(2, LEVELS)
        lists[0] = torch.inf
        lists[0, : len(boundaries)] = boundaries
        lists[1] = values[-1]
        lists[1, : len(values)] = values
        return table.to(device)
