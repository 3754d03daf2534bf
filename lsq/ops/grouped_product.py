"""A product of int8 codes whose scales belong to groups of values along the inner dimension, which
is not padded.

    out[m, n] = sum over groups g of a.scale[m, g] b.scale[n, g] (sum over k in g of a[m, k] b[n,
    k])

The inner sums are exact; scaled, they are added in float32 in the order of groups (Dai et al. 2021,
VS-Quant, arXiv:2102.04503, with float scales; powers of two make it MXINT8 of OCP Microscaling
Formats 1.0, 2023). Only CPUs have it: Project multiplies what FakeQuantize encoded by what
pack_weight packed, and the operation alone serves their tests. M rows, N columns, K values along
the inner dimension, G groups, the last of which may be smaller.
"""

from __future__ import annotations

import functools
import math

import torch

from lsq.native import loader, tiles
from lsq.native.launch import check
from lsq.program.declare import Codes, Floats, In, Out, Value, extent
from lsq.program.operation import Operation, Spec
from lsq.program.values import Weight
from lsq.quant.numbers import NumberFormat, ScaledFormat

STEP = 16
"""Group sizes are multiples of this; 32, 64 and 128 are fast."""
LARGE = 128
"""The group of codes whose rows have one scale."""


class GroupedCodes(Value):
    """A matrix [R, K] as integers with scales: codes * scale of their row and group."""

    codes: Codes  # [R, K]
    scale: Floats  # [R, G] or [R, 1], or [1, 1] for all.
    group: int
    """Values along K that share a scale; those whose sums are made together where rows have one."""

    columns = extent(1, "codes")  # K.
    scale_rows = extent(0, "scale")
    scale_columns = extent(1, "scale")

    def regrouped(self, group: int) -> GroupedCodes:
        """The matrix in groups of another size, if its rows have one scale.

        Raises:
            ValueError: groups have scales of their own.
        """
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


class GroupedProduct(Operation):
    """out [M, N] = a [M, K] times b [N, K] transposed; see above."""

    a: In[GroupedCodes]
    b: In[GroupedCodes]  # Its groups are those of a.
    out: Out[Floats]

    rows = extent(0, "a.codes")
    columns = extent(0, "b.codes")
    inner = extent(1, "a.codes")

    def __post_init__(self):
        group, (rows, inner), columns = self.b.group, self.a.codes.shape, self.b.codes.shape[0]
        check(
            group % STEP == 0 and group > 0,
            f"groups have {group} values; a product takes multiples of {STEP}, and 32, 64 and 128"
            " are fast",
        )
        check(
            self.a.group == group and self.b.codes.shape[1] == inner,
            f"a has rows of {inner} values in groups of {self.a.group}, b of"
            f" {self.b.codes.shape[1]} in groups of {group}; both must be the same",
        )
        groups = -(-inner // group)
        for name, codes, count in (("a", self.a, rows), ("b", self.b, columns)):
            allowed = [(count, groups), (count, 1), (1, 1)]
            check(
                tuple(codes.scale.shape) in allowed,
                f"scales of {name} have the shape {list(codes.scale.shape)}; its codes"
                f" {list(codes.codes.shape)} in groups of {group} take"
                f" {' or '.join(str(list(shape)) for shape in dict.fromkeys(allowed))}",
            )

    def reference(self):
        out = torch.zeros(self.out.shape, dtype=torch.float32)
        for number, first in enumerate(range(0, self.inner, self.a.group)):
            of_group = slice(first, first + self.a.group)
            sums = self.a.codes[:, of_group].double() @ self.b.codes[:, of_group].double().t()
            scales = [
                one.scale[:, min(number, one.scale.shape[1] - 1), None] for one in (self.a, self.b)
            ]
            out += sums.float() * (scales[0] * scales[1].t())
        return {"out": out}

    def cpu_scratch(self):
        return [
            ((packed_bytes(self),), torch.uint8),
            copies_of(self.rows, self.inner, self.b.group),
        ]

    def cpu(self, packed, rows):
        if not min(self.rows, self.columns, self.inner):
            self.out.zero_()
            return
        packed = aligned(packed)
        loader.call("lsq_pack_grouped", self, packed)
        self.multiply(packed, rows)

    def multiply(
        self, packed: torch.Tensor, rows: torch.Tensor, instructions: str | None = None
    ) -> None:
        """On the CPU, with b packed before: what a weight that does not change saves its products.

        Args:
            packed: as `lsq_pack_grouped` made it, aligned.
            rows: the second of `cpu_scratch`.
            instructions: one of tiles.usable(); None: the fastest.
        """
        number = tiles.INSTRUCTIONS[instructions or tiles.usable()[0]]
        loader.call("lsq_multiply_grouped", self, packed, aligned(rows), number)


def packed_bytes(product: GroupedProduct) -> int:
    """Bytes of b as the CPU packs it."""
    return tiles.packed_group_bytes(product.columns, product.inner, product.b.group)


def copies_of(rows: int, inner: int, group: int) -> Spec:
    """Scratch memory of the CPU for copies of a's rows."""
    depth = -(-inner // group) * group
    return (-(-rows // tiles.PAIR) * tiles.PAIR * depth + tiles.ALIGNMENT,), torch.uint8


def common_group(a: ScaledFormat, b: ScaledFormat) -> int | None:
    """In which groups codes of both formats are multiplied; None: they have no product of int8
    codes."""
    groups = {one.grain.columns for one in (a, b)} - {None} or {LARGE}
    whole = all(whole_factor(one.number) for one in (a, b))
    return min(groups) if whole and len(groups) == 1 and min(groups) % STEP == 0 else None


@functools.cache
def whole_factor(number: NumberFormat) -> int | None:
    """The least power of two that makes all values whole; None: there is none, or they are beyond
    127."""
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
    codes = (
        blocks[..., : pair * group]
        .view(torch.int8)
        .reshape(pairs, groups, 2, group // 4, pair // 2, 4)
    )
    codes = codes.permute(0, 2, 4, 1, 3, 5).reshape(pairs * pair, -1)[:rows, :columns]
    scale = blocks[..., pair * (group + 4) :].contiguous().view(torch.float32)
    scale = scale.permute(0, 2, 1).reshape(-1, groups)[:rows]
    return GroupedCodes(codes=codes, scale=scale, group=group).decode()
