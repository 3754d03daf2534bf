"""gcq: LightSeq's gradient communication quantisation, in its five steps.

1. The clip of each row of a bucket is a quantile of its magnitudes; the largest clip of all workers
counts (all-reduce MAX). 2. Values are divided by the number of workers N. 3. They are rounded to
codes of magnitude Q // N or less; Q is the largest int8 code. 4. Codes are added in int8
(all-reduce SUM), which cannot overflow. 5. Sums are multiplied by the scale, clip / Q. Three things
differ from LightSeq: nothing is divided by a clip of zero; a value that is not finite makes its
whole row non-finite on all workers; and the clip of a short last row ignores the padding behind it.
"""

import math

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from lsq.dist.collectives import Scratch
from lsq.dist.config import ROW, gcq_levels, kept_largest
from lsq.quant import GRADIENT


class GCQ:
    """Averages buckets over a group of workers; `scratch` holds codes. Raises ValueError: with so
    many workers, 0 is the only code."""

    def __init__(self, group: ProcessGroup, scratch: Scratch):
        self.group, self.scratch = group, scratch
        self.levels = gcq_levels(group.size())

    def average(self, buffer: Tensor) -> None:
        """Replace `buffer`, float [n], by its mean over the group."""
        values, count = buffer.numel(), -(-buffer.numel() // ROW)
        rows = self.scratch.take("rows", (count, ROW), torch.float32)
        flat = rows.view(-1)
        flat[:values].copy_(buffer)
        flat[values:].zero_()
        scale = _row_scales(rows, values)
        distributed.all_reduce(scale, op=ReduceOp.MAX, group=self.group)
        scaled = rows / (scale * self.group.size())
        codes = self.scratch.take("codes", tuple(rows.shape), torch.int8)
        # at scale 0 codes are 0
        codes.copy_(scaled.nan_to_num_(nan=0.0).clamp_(-self.levels, self.levels).round_())
        distributed.all_reduce(codes, op=ReduceOp.SUM, group=self.group)
        buffer.copy_((codes * scale).view(-1)[:values])


def _row_scales(rows: Tensor, values: int) -> Tensor:
    """Return clip / Q [R, 1] of rows [R, ROW] that hold `values` values and then zeros."""
    scale, rest = _scales(rows), values % ROW
    # without the padding, which would make the clip of a few values zero
    if rest:
        scale[-1:] = _scales(rows[-1:, :rest])
    return scale


def _scales(rows: Tensor) -> Tensor:
    """Return clip / Q [R, 1]; the clip is a quantile of the magnitudes of each row [R, n].

    A row with a NaN or an infinity gets infinity: MAX between workers keeps infinity, but may lose
    NaN.
    """
    largest = rows.abs().topk(kept_largest(rows.shape[1]), dim=1, sorted=False).values
    scale = largest.amin(1, keepdim=True) / GRADIENT.largest
    return torch.where(largest.isfinite().all(1, keepdim=True), scale, math.inf)
