"""Codes with a scale for each group of values along the inner dimension of a product.

    out[m, n] = sum over groups g of
        a.scale[m, g] b.scale[n, g] (sum over k in g of a[m, k] b[n, k])

Inner sums are exact. They are scaled and added in float32 in the order of groups (Dai et al. 2021,
VS-Quant, arXiv:2102.04503, with float scales; powers of two make it MXINT8 of OCP Microscaling
Formats 1.0, 2023). Only CPUs have this product: Project multiplies codes of FakeQuantize by packed
groups of pack_weight. M rows, N columns, K values along the inner dimension, G groups; the last one
may be smaller.
"""

from __future__ import annotations

import functools
import math

import torch

from lsq.native import tiles
from lsq.native.launch import check
from lsq.program.declare import Codes, Floats, Value, extent
from lsq.program.operation import Spec
from lsq.program.values import Weight
from lsq.quant.numbers import NumberFormat, ScaledFormat

STEP = 16
"""Group sizes are multiples of this; 32, 64 and 128 are fast."""
LARGE = 128  # Group size of codes with one scale for each row.


class GroupedCodes(Value):
    """A matrix [R, K] as codes * scale, with a scale for each row and group."""

    codes: Codes  # [R, K]
    scale: Floats  # [R, G] or [R, 1], or [1, 1] for all.
    group: int  # Values along K that share a scale, or whose products are summed together.

    columns = extent(1, "codes")  # K.
    scale_rows = extent(0, "scale")
    scale_columns = extent(1, "scale")

    def regrouped(self, group: int) -> GroupedCodes:
        """Return the matrix in other groups. Raises ValueError: groups have scales of their own."""
        check(
            group == self.group or self.scale.shape[1] == 1,
            f"codes have scales of groups of {self.group}, which cannot become groups of {group}:"
            " encode both operands in groups of one size",
        )
        return GroupedCodes(codes=self.codes, scale=self.scale, group=group)

    def decode(self) -> torch.Tensor:
        """Return the values, float32 [R, K]."""
        scale = self.scale
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * scale


def copies_of(rows: int, inner: int, group: int) -> Spec:
    """Return the CPU's scratch memory for copies of a's rows."""
    depth = -(-inner // group) * group
    return (-(-rows // tiles.PAIR) * tiles.PAIR * depth + tiles.ALIGNMENT,), torch.uint8


def common_group(a: ScaledFormat, b: ScaledFormat) -> int | None:
    """Return the group size in which codes of both formats are multiplied, or None."""
    groups = {one.grain.columns for one in (a, b)} - {None} or {LARGE}
    whole = all(whole_factor(one.number) for one in (a, b))
    return min(groups) if whole and len(groups) == 1 and min(groups) % STEP == 0 else None


@functools.cache
def whole_factor(number: NumberFormat) -> int | None:
    """Return the least power of two that makes all values whole and at most 127, or None."""
    values = [value for value in number.values if math.isfinite(value)]
    for factor in (1, 2, 4, 8):
        if all(float(value * factor).is_integer() for value in values):
            return factor if number.largest * factor <= 127 else None
    return None


def aligned(memory: torch.Tensor) -> torch.Tensor:
    """Return the memory from a multiple of ALIGNMENT on."""
    return memory[-memory.data_ptr() % tiles.ALIGNMENT :]


def unpacked_values(weight: Weight) -> torch.Tensor:
    """Reference: the values float32 [N, K] of weight.grouped."""
    (rows, columns), group, pair = weight.shape, weight.group, tiles.PAIR
    pairs, groups = -(-rows // pair), -(-columns // group)
    blocks = aligned(weight.grouped)[: pairs * groups * pair * (group + 8)].view(pairs, groups, -1)
    codes = blocks[..., : pair * group].view(torch.int8)
    codes = codes.reshape(pairs, groups, 2, group // 4, pair // 2, 4)
    codes = codes.permute(0, 2, 4, 1, 3, 5).reshape(pairs * pair, -1)[:rows, :columns]
    scale = blocks[..., pair * (group + 4) :].contiguous().view(torch.float32)
    scale = scale.permute(0, 2, 1).reshape(-1, groups)[:rows]
    return GroupedCodes(codes=codes, scale=scale, group=group).decode()
