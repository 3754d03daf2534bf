"""The gradient of a product's input; one pass also undoes the epilogue of the operation before it.

    g[m, k] = scale[m] * sum_n codes[m, n] * weight[n, k]         under backward="int8"

Then follow, in this order: the gradient from other readers of x; the straight-through mask of x and
the gradient of its clip; dropout; the slope of the activation; another gradient; sums over rows for
a bias; floats, or codes rounded per row. M rows, N outputs of the weight, padded to P in its codes,
K columns.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native import loader
from lsq.native.launch import FLOATS, check
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.sums import PartialSums
from lsq.program.declare import Activations, Floats, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Weight

GEMM = "project_input_gradient"  # Name of the product of codes in lsq.gemm.
PART_ROWS = 32  # Rows of one partial sum on the CPU, independent of the product's blocks.


class ProjectInputGradient(Operation):
    """The gradient of the input [M, K] of a Project, before the input's rounding and epilogue.

    Raises:
        ValueError: it has both dx and rounded.
    """

    gradient: In[RoundedGradient] | None  # [M, P], under backward="int8".
    floats: In[Activations] | None  # [M, P], under another `backward`; [M, N] in float mode.
    weight: In[Weight]
    """[N, K]; codes and scale alone; in float mode values alone, [K, N] if `in_out`."""
    x: In[Coded] | None  # [M, K]; None in float mode.
    nonlinearity: In[Nonlinearity] | None  # Of the product that made x.
    accumulated: In[Activations] | None
    """[M, K], gradient from other readers of x; may be dx if `gradient` is given."""
    added: In[Activations] | None  # [M, K], another gradient of dx's tensor, added last.
    dx: Out[Activations] | None  # [M, K]
    rounded: Out[RoundedGradient] | None  # [M, K], in place of dx.
    sum: Out[Floats] | None  # [K], over rows: the gradient of a bias.
    dclip: Out[Floats] | None  # [1], gradient of x's clip.
    parts: Out[Floats] | None  # Parts of `sum` and `dclip`, in place of these; see lsq.ops.sums.

    def __post_init__(self):
        check(
            self.dx is None or self.rounded is None,
            "a ProjectInputGradient has dx and rounded; give it one of them",
        )

    rows = extent(0, "gradient.codes", "floats")
    columns = extent(1, "weight")

    @size
    def dx_dtype(self) -> int:
        return 0 if self.dx is None else FLOATS[self.dx.dtype]

    @size
    def part_rows(self) -> int:
        return PART_ROWS

    def reference(self):
        dx, dclip = self._product(), torch.zeros(1, dtype=torch.float32)
        dx = dx if self.accumulated is None else dx + self.accumulated
        if self.x is not None:
            dx, dclip = self.x.straight_through(dx)
        dx = dx if self.nonlinearity is None else self.nonlinearity.undo(dx)
        if self.added is not None:
            dx = dx + self.added
        total = dx.sum(dim=0)
        return {
            "dx": dx,
            "rounded": self.rounded and self.rounded.encode(dx),
            "sum": total,
            "dclip": dclip,
            "parts": PartialSums.of(self.parts, self.columns, (total,), dclip, self.x).as_parts(),
        }

    def _product(self) -> torch.Tensor:
        if self.gradient is not None:
            sums = gemm.reference(self.gradient.codes, self.weight.codes.t())
            return sums.to(torch.float32) * self.gradient.scale[:, None]
        if self.weight.codes is None:
            return self.floats @ self.weight.floats_by_rows
        weight = self.weight.codes.to(torch.float32) * self.weight.scale[:, None]
        return self.floats.float() @ weight

    def cpu_scratch(self):
        rows, columns = self.rows, self.columns
        sums = [
            ((-(-rows // PART_ROWS) if self.sum is not None else 0, columns), torch.float32),
            ((rows,), torch.float32),
        ]
        if self.gradient is not None:
            return [*sums, gemm.scratch_for(GEMM, rows, columns, self.weight.matrix.shape[0])]
        product = [((rows, columns), torch.float32)] if self.dx is None else []
        if self.weight.codes is None:
            return [*sums, *product]
        return [*sums, *product, (tuple(self.weight.matrix.shape), torch.float32)]

    def cpu(self, partial, clip_sums, *scratch):
        check(
            self.added is None or self.added.dtype == torch.float32,
            "what is added to an input gradient on the CPU must be float32: give the product that"
            " made it that dtype",
        )
        if self.gradient is not None and self.rows:
            operands = self.gradient.codes, self.weight.codes.t()
            gemm.multiply(GEMM, self, *operands, *scratch, partial, clip_sums)
        elif self.rows:
            loader.call(
                "lsq_end_float_input_gradient",
                self,
                self._float_product(scratch),
                partial,
                clip_sums,
            )
        loader.call("lsq_finish_input_gradient", self, partial, clip_sums)

    def _float_product(self, scratch) -> torch.Tensor:
        """Return the product, float32 [M, K]."""
        product, *scratch = scratch if self.dx is None else (self.dx, *scratch)
        if self.weight.codes is None:
            return torch.mm(self.floats, self.weight.floats_by_rows, out=product)
        (weight,) = scratch
        torch.mul(self.weight.codes, self.weight.scale[:, None], out=weight)
        return torch.mm(self.floats, weight, out=product)
