"""Codes whose scales belong to groups of values along the inner dimension of a product.

    out[m, n] = sum over groups g of
        a.scale[m, g] b.scale[n, g] (sum over k in g of a[m, k] b[n, k])

Inner sums are exact; scaled, they are added in float32 in the order of groups (Dai et al. 2021,
VS-Quant, arXiv:2102.04503, with float scales; powers of two make it MXINT8 of OCP Microscaling
Formats 1.0, 2023). Only CPUs have it: Project multiplies what FakeQuantize encoded by what
pack_weight packed. M rows, N columns, K values along the inner dimension, G groups, the last of
which may be smaller.
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
LARGE = 128  # The group of codes whose rows have one scale.


class GroupedCodes(Value):
    """A matrix [R, K] as integers with scales: codes * scale of their row and group."""

    codes: Codes  # [R, K]
    scale: Floats  # [R, G] or [R, 1], or [1, 1] for all.
    group: int  # Values along K that share a scale, or are summed together.

    columns = extent(1, "codes")  # K.
    scale_rows = extent(0, "scale")
    scale_columns = extent(1, "scale")

    def regrouped(self, group: int) -> GroupedCodes:
        """The matrix in groups of another size; ValueError where groups have scales of their
        own."""
        check(
            group == self.group or self.scale.shape[1] == 1,
            f"codes have scales of groups of {self.group}, which cannot become groups of {group}:"
            " encode both operands in groups of one size",
        )
        return GroupedCodes(codes=self.codes, scale=self.scale, group=group)

    def decode(self) -> torch.Tensor:
        """float32 [R, K]."""
        scale = self.scale
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * scale


def copies_of(rows: int, inner: int, group: int) -> Spec:
    """Scratch memory of the CPU for copies of a's rows."""
    depth = -(-inner // group) * group
    return (-(-rows // tiles.PAIR) * tiles.PAIR * depth + tiles.ALIGNMENT,), torch.uint8


def common_group(a: ScaledFormat, b: ScaledFormat) -> int | None:
    """Group size in which codes of both formats are multiplied; None: they have no product."""
    groups = {one.grain.columns for one in (a, b)} - {None} or {LARGE}
    whole = all(whole_factor(one.number) for one in (a, b))
    return min(groups) if whole and len(groups) == 1 and min(groups) % STEP == 0 else None


@functools.cache
def whole_factor(number: NumberFormat) -> int | None:
    """Least power of two that makes all values whole and at most 127; None: there is none."""
    values = [value for value in number.values if math.isfinite(value)]
    for factor in (1, 2, 4, 8):
        if all(float(value * factor).is_integer() for value in values):
            return factor if number.largest * factor <= 127 else None
    return None


def aligned(memory: torch.Tensor) -> torch.Tensor:
    """Bytes from a multiple of ALIGNMENT on."""
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
