"""Codes with a scale for each group of values along the inner dimension of a product.

    out[m, n] = sum over groups g of
        a.scale[m, g] b.scale[n, g] (sum over k in g of a[m, k] b[n, k])

Inner sums are exact. They are scaled and added in float32 in the order of groups (Dai et al. 2021,
VS-Quant, arXiv:2102.04503, with float scales; powers of two make it MXINT8 of OCP Microscaling
Formats 1.0, 2023). Only CPUs have this product: Project multiplies codes of FakeQuantize by the
fields of pack_weight. M rows, N columns, K values along the inner dimension, G groups; the last one
may be smaller.
"""

from __future__ import annotations

import functools
import math

import torch

from lsq.native.launch import check
from lsq.program.declare import Codes, Floats, Value, extent
from lsq.quant.numbers import NumberFormat, ScaledFormat
from lsq.quant.stored import most_summed, stored_type

STEP = 16
"""Group sizes are multiples of this; 32, 64 and 128 are fast."""
WHOLE = 64  # Sums of all inputs take whole multiples.


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


def common_group(x: ScaledFormat | None, weight: ScaledFormat, inner: int) -> int | None:
    """Return how many of `inner` products are summed as integers, or None: they are not whole.
    x without a format is floats, which the product rounds to 16 bits."""
    stored = stored_type(weight.number)
    if (x is not None and whole_factor(x.number) is None) or not stored.whole:
        return None
    grains = [weight.grain] if x is None else [x.grain, weight.grain]
    groups, most = {one.columns for one in grains} - {None}, most_summed(stored)
    whole = -(-inner // WHOLE) * WHOLE
    if not groups:
        return min(whole, most // WHOLE * WHOLE)
    group = min(groups)
    return min(group, whole) if len(groups) == 1 and group % STEP == 0 and group <= most else None


@functools.cache
def whole_factor(number: NumberFormat) -> int | None:
    """Return the least power of two that makes all values whole and at most 127, or None."""
    values = [value for value in number.values if math.isfinite(value)]
    for factor in (1, 2, 4, 8):
        if all(float(value * factor).is_integer() for value in values):
            return factor if number.largest * factor <= 127 else None
    return None
