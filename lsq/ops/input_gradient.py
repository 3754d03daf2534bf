"""The gradient of what a weight is multiplied with, and the end of the operation before, undone in
the same pass.

    g[m, k] = scale[m] * sum_n codes[m, n] * weight[n, k]         under backward="int8"

Then, in this order: the same from other readers of x, the straight-through mask of x and the
gradient of its clip, dropout, the slope of the activation, another gradient that is added; sums
over rows for a bias; floats, or codes rounded per row. M rows, N outputs of the weight, padded to P
in its codes, K columns.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native import loader
from lsq.native.geometry import row_defines
from lsq.native.launch import FLOATS, Product, check, float_define, launch
from lsq.ops.input_gradient_product import (
    clip_parts,
    end_defines,
    input_gradient_product,
    tile_parts,
)
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.products import (
    converted,
    converted_scratch,
    float_product,
    float_product_into,
    int8_products,
    narrow_scratch,
    sums_scratch,
)
from lsq.ops.sums import PartialSums, as_parts, check_parts, finish, parts_of
from lsq.ops.transpose import transpose_codes
from lsq.program.declare import Activations, Floats, Host, In, Out, extent, size
from lsq.program.operation import Operation, Spec
from lsq.program.values import Coded, RoundedGradient, Weight

GEMM = "project_input_gradient"
"""What lsq.gemm calls the product of codes."""
PART_ROWS = 32
"""Rows that are summed apart on the CPU, whatever the blocks of the product."""
PRODUCTS = {torch.int32: 0, torch.float32: 1}
"""-DPRODUCT by dtype; else 2: Float."""
LONG_SUMS = 3
"""-DPRODUCT of sums of codes as float32."""


class ProjectInputGradient(Operation):
    """The gradient of the input [M, K] of a Project, before its rounding, and before the end of
    what made it.

    Raises:
        ValueError: it shall go to floats and to codes.
    """

    gradient: In[RoundedGradient] | None
    """[M, P], under backward="int8"."""
    floats: In[Activations] | None
    """[M, P], otherwise; [M, N] in float mode."""
    weight: In[Weight]
    """[N, K]; codes and scale alone, or, in float mode, values alone, by inputs [K, N].

    A GPU transposes codes that did not come so.
    """
    x: In[Coded] | None
    """[M, K]; None in float mode."""
    nonlinearity: In[Nonlinearity] | None
    """Of the product that made x; None if x was made otherwise."""
    joined: In[Activations] | None
    """[M, K], from other readers of x; with a rounded gradient, it may be the memory of dx."""
    added: In[Activations] | None
    """[M, K], another gradient of the same, as it will be in the end."""
    dx: Out[Activations] | None
    """[M, K]"""
    rounded: Out[RoundedGradient] | None
    """[M, K], in place of dx."""
    sum: Out[Floats] | None
    """[K], over rows: the gradient of a bias."""
    dclip: Out[Floats] | None
    """[1], of x."""
    parts: Out[Floats] | None
    """Of `sum` and `dclip`, in place of these; see lsq.ops.sums."""
    dtype: Host[str] = "float32"
    """Of the product of floats."""

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
        dx = dx if self.joined is None else dx + self.joined
        if self.x is not None:
            dx, dclip = self.x.straight_through(dx)
        dx = dx if self.nonlinearity is None else self.nonlinearity.undo(dx)
        if self.added is not None:
            dx = dx + self.added
        rounded = self.rounded.encode(dx) if self.rounded is not None else (None, None)
        sums = dx.sum(dim=0), dclip
        return dx, *rounded, *sums, as_parts(self.parts, self._sums(self.parts, *sums))

    def _product(self) -> torch.Tensor:
        if self.gradient is not None:
            sums = gemm.reference(self.gradient.codes, self.weight.codes.t())
            return sums.to(torch.float32) * self.gradient.scale[:, None]
        if self.weight.codes is None:
            return self.floats @ self.weight.floats_by_rows
        return float_product(
            self.floats,
            self.weight.codes.to(torch.float32) * self.weight.scale[:, None],
            self.dtype,
        )

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
        weight = [(tuple(self.weight.matrix.shape), getattr(torch, self.dtype))]
        return [
            *sums,
            *product,
            *weight,
            *narrow_scratch(self.floats.shape, (rows, columns), self.dtype),
        ]

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
        """float32 [M, K]."""
        product, *scratch = scratch if self.dx is None else (self.dx, *scratch)
        if self.weight.codes is None:
            return torch.mm(self.floats, self.weight.floats_by_rows, out=product)
        weight, *narrow = scratch
        torch.mul(self.weight.codes, self.weight.scale[:, None], out=weight)
        float_product_into(product, self.floats, weight, narrow)
        return product

    @property
    def _tile(self) -> gemm.TileConfiguration | None:
        """How one kernel of a GPU makes the product and ends it; None: a library makes it, another
        kernel ends it."""
        # to round a row takes all of its tiles
        if self.gradient is None or self.rounded is not None:
            return None
        return gemm.cuda_tile(GEMM, self.rows, self.columns, self.gradient.codes.shape[1])

    @property
    def _parts(self) -> Spec:
        """(shape, dtype) of what a GPU leaves of the sums."""
        tile = self._tile
        return (
            parts_of(self.rows, self.columns, 1)
            if tile is None
            else tile_parts(tile, self.rows, self.columns)
        )

    def cuda_scratch(self):
        partial = [] if self.parts is not None else [self._parts]
        shape = self.rows, self.columns
        if self.gradient is not None:
            sums = sums_scratch(*shape, self.gradient.codes.shape[1]) if self._tile is None else []
            transposed = tuple(reversed(self.weight.matrix.shape)), torch.int8
            return [*partial, *([transposed] if self.weight.transposed is None else []), *sums]
        dtype = self._product_dtype
        product = [] if self._in_place else [(shape, torch.float32)]
        operands = [
            *converted_scratch(self.weight.matrix, dtype),
            *converted_scratch(self.floats, dtype),
        ]
        return [*partial, *product, *operands]

    def leave_sums(self, tensor):
        found = self._sums(tensor(self.outputs[0].name + ".parts", *self._parts))
        if not found.wanted:
            return []
        self.parts, self.sum, self.dclip = found.parts, None, None
        return [found]

    def _sums(self, parts, *totals) -> PartialSums:
        total, clip = totals or (self.sum, self.dclip)
        tile = None if parts is None else self._tile
        clips = 1 if tile is None else clip_parts(tile, self.columns)
        return PartialSums.of(parts, self.columns, (total,), clip, self.x, clips)

    def cuda(self, *scratch):
        partial, *scratch = scratch if self.parts is None else (self.parts, *scratch)
        check_parts(partial, self._parts)
        entries_of = self._int8_entries if self.gradient is not None else self._float_entries
        entries = entries_of(partial, scratch)
        return [*entries, *finish(self._sums(partial), leaves=self.parts is not None)]

    def _int8_entries(self, partial, scratch):
        tile, weight, turned = self._tile, self.weight.transposed, []
        if weight is None:
            weight, *scratch = scratch
            turned = [transpose_codes(self.weight.codes, weight)]
        if tile is not None:
            return [*turned, input_gradient_product(self, tile, weight, partial)]
        op = GEMM if self.rounded is None else Product.op  # which no kernel ends
        products = int8_products(self.gradient.codes, weight, *scratch, op=op)
        return [*turned, *products, self._end(scratch[-1], partial)]

    def _float_entries(self, partial, scratch):
        scratch = iter(scratch)
        product = self.dx if self._in_place else next(scratch)
        weights, weight = converted(
            self.weight.matrix, self.weight.scale, self._product_dtype, scratch
        )
        gradients, gradient = converted(self.floats, None, self._product_dtype, scratch)
        multiply = Product(a=gradient, b=weight, out=product, transpose_b=not self.weight.turned)
        return [
            *weights,
            *gradients,
            *([multiply] if self.rows else []),
            self._end(product, partial),
        ]

    def _end(self, product, partial):
        before = self.nonlinearity and self.nonlinearity.before
        long = self.gradient is not None and product.dtype == torch.float32
        given = [
            one
            for one in (self.floats, before, self.joined, self.added, self.dx)
            if one is not None
        ]
        return launch(
            "input_gradient.cu",
            "lsq_project_input_gradient",
            self,
            product,
            partial,
            grid=len(partial),
            PRODUCT=LONG_SUMS if long else PRODUCTS.get(product.dtype, 2),
            ROUNDED=int(self.rounded is not None),
            **end_defines(self),
            **(float_define(*given) if given else {"FLOAT": FLOATS[torch.float32]}),
            **row_defines(self.columns),
        )

    @property
    def _product_dtype(self) -> torch.dtype:
        return self.floats.dtype if self.weight.codes is None else getattr(torch, self.dtype)

    @property
    def _in_place(self) -> bool:
        """Whether the product of floats on a GPU can be written where its end goes."""
        return self.dx is not None and self.dx.dtype in (torch.float32, self._product_dtype)
