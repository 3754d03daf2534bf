"""Rounding by itself: of activations, of weights, of the gradient of a product; and the sum of two
gradients.

The gradient of rounded codes is by convention the one *before* the rounding: whoever reads the
codes applies the straight-through mask, in the loop that it runs anyway, and adds to the gradient
of the clip. M rows, N columns; a weight has N rows (output channels) and K columns.
"""

from __future__ import annotations

import dataclasses

import torch

from lsq.native import loader
from lsq.native.geometry import THREADS, VECTOR, row_defines, warp_blocks
from lsq.native.launch import FLOATS, TICKET, float_define, launch
from lsq.ops import kernels
from lsq.ops.scales import started
from lsq.ops.sums import PartialSums, as_parts, finish, parts_of
from lsq.ops.transpose import transpose_codes
from lsq.ops.weight_in_out import round_in_out
from lsq.program.declare import Activations, Codes, Floats, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Weight
from lsq.quant import largest_clips
from lsq.quant.formats import GROUP

VECTORS = 4
"""Of 8 values: what a thread of lsq_round rounds."""


class Round(Operation):
    """An activation as codes under its clip."""

    x: In[Activations]
    """[M, N]; of either dtype, on the CPU too."""
    rounded: Out[Coded]
    """[M, N]"""

    @size
    def count(self) -> int:
        return self.x.numel()

    @size
    def x_dtype(self) -> int:
        return FLOATS[self.x.dtype]

    def unrounded(self, run) -> torch.Tensor:
        return self.x

    @property
    def same_values(self):
        return self.x, self.rounded.codes

    def reference(self):
        return self.rounded.encode(self.x.float())

    def cuda(self):
        kernels.check_columns(VECTOR, **{"the width of what is rounded": self.x.shape[1]})
        return [
            launch(
                "rounding.cu",
                "lsq_round",
                self,
                TICKET,
                grid=max(1, -(-self.count // (VECTORS * VECTOR * THREADS))),
                **float_define(self.x),
                **started(self.rounded),
            )
        ]

    def gradient(self, builder) -> None:
        builder.accumulate(self.x, builder.gradient_of(self.rounded.codes))


class RoundWeight(Operation):
    """The codes of a weight from its values and clips.

    The product of its gradient masks its own result.
    """

    weight: Out[Weight]
    """values [N, K] or [K, N], clip [N] or [1] -> what is stored of codes [P, K], scale [P], on a
    GPU codes transposed.

    Rows from N on: 0, and scale 1.
    """
    new_clip: Out[Floats] | None
    """[N], the largest magnitude of each row, which is rounded under it; the memory of the clip."""

    rows = extent(0, "weight.codes")
    """P."""
    stored = extent(1, "weight.codes")
    """Bytes of a row."""
    clips = extent(0, "weight.clip")

    @size
    def valid(self) -> int:
        """N."""
        return self.weight.values.shape[self.weight.in_out]

    @size
    def columns(self) -> int:
        """K."""
        return self.weight.values.shape[1 - self.weight.in_out]

    def reference(self):
        weight, padding = self.weight, self.rows - self.valid
        clip = (
            weight.clip
            if self.new_clip is None
            else largest_clips(weight.values_by_rows, weight.clip)
        )
        codes, scale = weight.format.encode(weight.values_by_rows, clip)
        codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
        return (
            codes,
            torch.nn.functional.pad(scale, (0, padding), value=1.0),
            codes.t(),
            None,
            None,
            clip,
        )

    def cpu(self):
        loader.call(f"lsq_round_{self.weight.format.name}", self)

    def cuda(self):
        form, grid, transposed = self.weight.format, warp_blocks(self.rows), self.weight.transposed
        if self.weight.in_out:
            return round_in_out(self)
        kernels.check_columns(16, **{"the width of a weight": self.columns})
        if form.packed:
            return [launch(f"{form.name}.cu", f"lsq_round_{form.name}", self, TICKET, grid=grid)]
        rounding = launch("rounding_weight.cu", "lsq_round_weight", self, TICKET, grid=grid)
        return [
            rounding,
            *([] if transposed is None else [transpose_codes(self.weight.codes, transposed)]),
        ]


class UnpackWeight(Operation):
    """The codes of a weight that its format stores otherwise, for the products that follow."""

    weight: In[Weight]
    """[P, stored columns]"""
    codes: Out[Codes]
    """[P, K]"""

    rows = extent(0, "codes")
    """P."""
    columns = extent(1, "codes")
    """K."""
    stored = extent(1, "weight.codes")
    """Bytes of a row."""

    def reference(self):
        return (self.weight.format.unpack(self.weight.codes, self.columns),)

    def cpu(self):
        loader.call(f"lsq_unpack_{self.weight.format.name}", self)

    def cuda(self):
        name, groups = self.weight.format.name, self.rows * -(-self.columns // GROUP)
        kernels.check_columns(
            16, **{"the width of a weight": self.columns, "its padded number of rows": self.rows}
        )
        return [
            launch(f"{name}.cu", f"lsq_unpack_{name}", self, grid=max(1, -(-groups // THREADS)))
        ]

    def gradient(self, builder) -> None:
        """That of the weight comes from whoever multiplies by it."""


def unpacked(builder, weight: Weight, rows: int | None = None) -> Weight:
    """The weight as the next product reads it.

    Each pass unpacks anew, so that no unpacked codes wait for another.

    `rows`: of x, of a product that reads weights as they are stored where those are few enough.
    """
    stored = builder.stored(weight)
    if (
        stored.codes is None
        or not stored.format.packed
        or (rows is not None and rows <= builder.packed_rows)
    ):
        return stored
    codes = builder.tensor(
        stored.codes.name + ".unpacked", (stored.codes.shape[0], stored.values.shape[1]), torch.int8
    )
    builder.add(UnpackWeight(weight=stored.bare(), codes=codes))
    return dataclasses.replace(stored, codes=codes, format=stored.format.unpacked)


WIDEST_TOGETHER = 8192
"""Columns up to which registers hold a row and its sums: wider rows are rounded in one pass and
summed in another."""


class RoundGradient(Operation):
    """The gradient of a product at the end of a program, for what goes back from there."""

    gradient: In[Activations]
    """[M, N]; of either dtype, on the CPU too."""
    rounded: Out[RoundedGradient] | None
    """[M, N]; None: the products that go back take floats."""
    sum: Out[Floats] | None
    """[N], the gradient summed over rows: that of the product's bias."""
    parts: Out[Floats] | None
    """Of `sum`, in its place; see lsq.ops.sums."""

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    @size
    def gradient_dtype(self) -> int:
        return FLOATS[self.gradient.dtype]

    def reference(self):
        gradient = self.gradient.float()
        codes, scale = self.rounded.encode(gradient) if self.rounded is not None else (None, None)
        total = gradient.sum(dim=0)
        return codes, scale, total, as_parts(self.parts, self._sums(self.parts, total))

    def leave_sums(self, tensor):
        if self.sum is None:
            return []
        found = self._sums(
            tensor(self.sum.name + ".parts", *parts_of(self.rows, self.columns, 1)), self.sum
        )
        self.parts, self.sum = found.parts, None
        return [found]

    def _sums(self, parts, total) -> PartialSums:
        return PartialSums.of(parts, self.columns, (total,))

    def cuda_scratch(self):
        return [] if self.parts is not None else [parts_of(self.rows, self.columns, 1)]

    def cuda(self, *scratch):
        (partial,) = scratch or (self.parts,)
        rounds, sums = self.rounded is not None, self.sum is not None or self.parts is not None
        apart = rounds and sums and self.columns > WIDEST_TOGETHER
        passes = [(True, False), (False, True)] if apart else [(rounds, sums)]
        entries = [self._pass(partial, *each) for each in passes]
        return [*entries, *finish(self._sums(partial, self.sum), leaves=self.parts is not None)]

    def _pass(self, partial, rounds: bool, sums: bool):
        return launch(
            "rounding_gradient.cu",
            "lsq_round_gradient",
            self,
            partial if sums else None,
            grid=len(partial),
            ROUNDED=int(rounds),
            SUMMED=int(sums),
            **float_define(self.gradient),
            **row_defines(self.columns),
        )


class Add(Operation):
    """a + b: two gradients of one tensor."""

    a: In[Activations]
    """Any shape."""
    b: In[Activations]
    out: Out[Activations]

    @size
    def count(self) -> int:
        return self.out.numel()

    def reference(self):
        return (self.a + self.b,)

    def cuda(self):
        grid = max(1, -(-self.count // (VECTOR * THREADS)))
        return [
            launch(
                "elementwise.cu",
                "lsq_add",
                self,
                grid=grid,
                **float_define(self.a, self.b, self.out),
            )
        ]
