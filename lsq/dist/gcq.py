"""gcq: LightSeq's gradient communication quantisation, in its five steps.

1. The clip of each row of a bucket is a quantile of its magnitudes; the largest of all workers is
taken (all-reduce MAX). 2. Values are divided by the number of workers N. 3. They are rounded to
codes within Q // N, Q being the largest code of int8, 4. which are added up in int8 (all-reduce
SUM) and cannot overflow, 5. and multiplied by the scale, clip / Q. Three differences: a clip of
zero divides nothing, what is not finite makes its whole row non-finite on all workers, and the clip
of a short last row comes from its own values, not from the zeros behind them.
"""

import math

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp

from lsq.dist.collectives import Scratch
from lsq.dist.config import QUANTILE, ROW, gcq_levels, kept_largest
from lsq.quant import GRADIENT


class GCQ:
    """Averages buckets over a group; see the module.

    Args:
        group: the workers.
        scratch: holds codes.
        row: values that share a clip.
        quantile: share of a row's magnitudes that lie within its clip.

    Raises:
        ValueError: so many workers leave no code but 0.
    """

    def __init__(
        self, group: ProcessGroup, scratch: Scratch, row: int = ROW, quantile: float = QUANTILE
    ):
        self.group, self.row, self.quantile, self.scratch = group, row, quantile, scratch
        self.levels = gcq_levels(group.size())

    def average(self, buffer: Tensor) -> None:
        """Replace `buffer`, float [n], by its mean over the group."""
        rows = self.rows(buffer)
        scale = row_scales(rows, buffer.numel(), self.quantile)
        distributed.all_reduce(scale, op=ReduceOp.MAX, group=self.group)
        codes = self.scratch.take("codes", tuple(rows.shape), torch.int8)
        encode(rows, scale, self.group.size(), self.levels, codes)
        distributed.all_reduce(codes, op=ReduceOp.SUM, group=self.group)
        buffer.copy_(decode(codes, scale).view(-1)[: buffer.numel()])

    def rows(self, buffer: Tensor) -> Tensor:
        """`buffer` in float32 rows [R, row], the last one filled up with zeros; scratch memory."""
        count = -(-buffer.numel() // self.row)
        rows = self.scratch.take("rows", (count, self.row), torch.float32)
        flat = rows.view(-1)
        flat[: buffer.numel()].copy_(buffer)
        flat[buffer.numel() :].zero_()
        return rows


def row_scales(rows: Tensor, values: int, quantile: float) -> Tensor:
    """clip / Q [R, 1] of each row [R, row] of a bucket of `values` values, behind which the last
    row has zeros.

    A row that holds a NaN or an infinity has infinity: MAX between workers carries that, but may
        lose a NaN.
    """
    row = rows.shape[1]
    scale = _scales(rows, kept_largest(row, quantile))
    rest = values % row
    # zeros that are no values count for nothing: with them, the clip of a few values would be zero
    if rest:
        scale[-1:] = _scales(rows[-1:, :rest], kept_largest(rest, quantile))
    return scale


def _scales(rows: Tensor, place: int) -> Tensor:
    """`row_scales` where the clip is the magnitude at `place` of each row, counted from the
    largest, 1."""
    largest = rows.abs().topk(place, dim=1, sorted=False).values
    scale = largest.amin(1, keepdim=True) / GRADIENT.largest
    return torch.where(largest.isfinite().all(1, keepdim=True), scale, math.inf)


def encode(rows: Tensor, scale: Tensor, workers: int, levels: int, codes: Tensor) -> None:
    """Write int8 `codes` [R, row] of rows / workers under scale [R, 1], within `levels`; at scale 0
    they mean 0."""
    scaled = rows / (scale * workers)
    codes.copy_(scaled.nan_to_num_(nan=0.0).clamp_(-levels, levels).round_())


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [R, row] of codes [R, row] under scale [R, 1]: NaN or infinity where the scale is
    infinite."""
    return codes * scale
