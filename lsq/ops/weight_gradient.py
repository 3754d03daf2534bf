"""The gradient of a weight, and of its clip. Under backward="int8":

    dweight[n, k] = x_scale * (1 / weight_scale[n]) * sum_m codes[m, n] * (scale[m] * x[m, k])

The row scale of the gradient, and that of x where each row has one, is folded into x, which is
rounded again, at random, with a scale for each column. So one int8 gradient, which carries the
weight's scales, serves both backward products (see RoundedGradient). The mask of the
straight-through gradient is |weight| <= clip. M rows, N outputs of the weight, padded to P in its
codes, K columns.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native import loader
from lsq.native.geometry import MANY_BLOCKS, TILE, padded, row_blocks, row_defines, tiles
from lsq.native.launch import Product, launch
from lsq.ops.kernels import check_columns, zero
from lsq.ops.products import (
    SUMS,
    converted,
    converted_scratch,
    float_product,
    float_product_into,
    int8_products,
    narrow_scratch,
    sums_scratch,
)
from lsq.ops.sums import as_parts, check_parts, finish
from lsq.ops.transpose import transposed_scratch
from lsq.ops.weight_gradient_product import (
    split_scratch,
    sums_of_clips,
    tile_clip_sums,
    weight_gradient_product,
)
from lsq.ops.weight_in_out import clip_sums_in_out, end_in_out
from lsq.program.declare import (
    Activations,
    Floats,
    Host,
    In,
    Indices,
    Out,
    Parameters,
    extent,
    factor,
    size,
)
from lsq.program.operation import Operation, Spec
from lsq.program.values import RoundedGradient, Rows, Weight
from lsq.quant import arithmetic

GEMM = "project_weight_gradient"
"""What lsq.gemm calls the product of codes."""
PARTS = 16
"""Most runs of rows whose largest magnitudes per column are found apart."""


class ProjectWeightGradient(Operation):
    """The gradient of the weight [N, K] of a Project, before its rounding, and that of its clip."""

    gradient: In[RoundedGradient] | None
    """[M, P], under backward="int8"."""
    floats: In[Activations] | None
    """[M, P], otherwise; [M, N] in float mode."""
    x: In[Rows]
    """[M, K]"""
    weight: In[Weight]
    """[P, K]; in float mode it has no codes."""
    key: In[Indices] | None
    """[1]; with `subsequence`, of the random numbers under backward="int8"."""
    subsequence: int = 0
    lsq: bool = False
    """The clip learns by LSQ, not PACT."""
    dweight: Out[Parameters]
    """[N, K], or [K, N] where the weight is by inputs; of the dtype of its values."""
    dclip: Out[Floats] | None
    """[N] or [1], like the clip."""
    parts: Out[Floats] | None
    """Of `dclip`, in its place; see lsq.ops.sums."""
    dtype: Host[str] = "float32"
    """Of the product of floats."""

    rows = extent(0, "gradient.codes", "floats")
    clips = extent(0, "weight.clip")

    @size
    def weight_rows(self) -> int:
        """N."""
        return self.dweight.shape[self.weight.in_out]

    @size
    def columns(self) -> int:
        """K."""
        return self.dweight.shape[1 - self.weight.in_out]

    @factor
    def clip_factor(self) -> float:
        if not self.lsq:
            return 1.0
        return arithmetic.lsq_factor(
            self.weight_rows * self.columns // self.clips, self.weight.format.bits
        )

    @property
    def _upstream(self) -> torch.Tensor:
        return self.floats if self.gradient is None else self.gradient.codes

    @property
    def _product_dtype(self) -> torch.dtype:
        """Of the operands of a product of floats, on a GPU."""
        return self.x.floats.dtype if self.x.coded is None else getattr(torch, self.dtype)

    @property
    def _float_mode(self) -> bool:
        return self.weight.codes is None and self.weight.clip is None

    def reference(self):
        if self._float_mode:
            return self._as_held(self.floats.t() @ self.x.floats), None, None
        if self.gradient is None:
            x = self.x.floats if self.x.coded is None else self.x.coded.decode()
            product = float_product(self.floats.t(), x, self.dtype)
        else:
            of_rows, shared = self.gradient.scale[:, None], self.x.scale
            if self.x.coded.by_row:
                of_rows, shared = of_rows * shared, 1.0
            codes, scale = arithmetic.round_columns(
                self.x.tensor.to(torch.float32) * of_rows,
                self.key,
                self.subsequence,
                self.gradient.format.largest,
            )
            product = gemm.reference(self.gradient.codes.t(), codes.t()).to(torch.float32)
            product = product * (scale * shared) * (1.0 / self.weight.scale)[:, None]
        dweight, dclip = self._straight_through(product[: self.weight_rows])
        dweight = self._as_held(dweight).to(self.weight.values.dtype)
        found = None if self.parts is None else sums_of_clips(self.parts, self.clips, dclip)
        return dweight, dclip, as_parts(self.parts, found)

    def _as_held(self, dweight: torch.Tensor) -> torch.Tensor:
        """[N, K] as the weight is, or the other way round."""
        return dweight.t() if self.weight.in_out else dweight

    def _straight_through(self, product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product [N, K] masked by |weight| <= clip, and what belongs to the clip."""
        weight, clip = self.weight.values_by_rows, self.weight.clip
        limit = clip.reshape(-1, 1)
        outside = (weight.abs() > limit) & (not self.weight.absmax)
        contribution = torch.where(outside, product * weight.sign(), 0.0)
        if self.lsq:
            rows = slice(self.weight_rows)
            decoded = self.weight.codes[rows].to(torch.float32) * self.weight.scale[rows, None]
            contribution = (
                torch.where(outside, contribution, product * (decoded - weight) / limit)
                * self.clip_factor
            )
        return torch.where(outside, 0.0, product), contribution.reshape(clip.shape[0], -1).sum(
            dim=1
        )

    def cpu_scratch(self):
        if self._float_mode:
            return []
        (rows, inner), columns = self._upstream.shape, self.columns
        sums, x = ((self.weight_rows,), torch.float32), (rows, columns)
        if self.gradient is not None:
            memory = gemm.scratch_for(GEMM, inner, columns, rows)
            return [sums, (x, torch.int8), ((columns,), torch.float32), memory]
        product = (inner, columns)
        if self.x.coded is None:
            return [sums, (product, torch.float32)]
        floats = [(product, torch.float32), (x, getattr(torch, self.dtype))]
        return [sums, *floats, *narrow_scratch((inner, rows), product, self.dtype)]

    def cpu(self, *scratch):
        if self._float_mode:
            torch.mm(self.floats.t(), self.x.floats, out=self._as_held(self.dweight))
        elif self.rows == 0:
            self.dweight.zero_()
            if self.dclip is not None:
                self.dclip.zero_()
        else:
            self._rounded_on_cpu(*scratch)

    def _rounded_on_cpu(self, sums, *scratch):
        if self.x.coded is None:
            (product,) = scratch
            torch.mm(self.floats.t(), self.x.floats, out=product)
            loader.call("lsq_end_float_weight_gradient", self, product, sums)
        elif self.gradient is None:
            product, floats, *narrow = scratch
            torch.mul(self.x.tensor, self.x.scale, out=floats)
            float_product_into(product, self.floats.t(), floats, narrow)
            loader.call("lsq_end_float_weight_gradient", self, product, sums)
        else:
            codes, column_scale, memory = scratch
            gradient = self.gradient.codes.t()
            if gemm.is_long(GEMM, self.rows):  # else tiles are rounded as they are packed
                loader.call("lsq_round_columns", self, codes, column_scale)
            gemm.multiply(GEMM, self, gradient, codes.t(), memory, column_scale, sums)
        loader.call("lsq_finish_weight_gradient", self, sums)

    @property
    def _tile(self) -> gemm.TileConfiguration | None:
        """How one kernel of a GPU makes the product and ends it; None: a library makes it, another
        kernel ends it."""
        if self.gradient is None or self.weight.in_out:
            return None
        rows, inner = self.gradient.codes.shape
        return gemm.cuda_tile(GEMM, inner, self.columns, padded(rows) if rows else 0)

    @property
    def _clip_sums(self) -> Spec:
        """(shape, dtype) of what a GPU leaves of the gradients of the clips."""
        if self.weight.in_out:
            return clip_sums_in_out(self)
        tile = self._tile
        if tile is None:
            return (self.weight_rows, 1), torch.float32
        return tile_clip_sums(tile, self.weight_rows, self.columns, self.clips)

    @property
    def _leaves_no_sums(self) -> bool:
        """Whether the kernel on rows makes the gradients of the clips, of which each row has
        one."""
        return self.clips > 1 and self._tile is None and not self.weight.in_out

    def leave_sums(self, tensor):
        if self.dclip is None or self._leaves_no_sums:
            return []
        found = sums_of_clips(
            tensor(self.dclip.name + ".parts", *self._clip_sums), self.clips, self.dclip
        )
        self.parts, self.dclip = found.parts, None
        return [found]

    def cuda_scratch(self):
        if self._float_mode:
            return []
        (rows, inner), columns, tile = self._upstream.shape, self.columns, self._tile
        sums = [] if self.parts is not None else [self._clip_sums]
        product = (columns, inner) if self.weight.in_out else (inner, columns)
        if self.gradient is not None:
            parts = max(1, min(PARTS, -(-rows // TILE)))
            made = (
                split_scratch(tile, self.weight_rows, columns)
                if tile
                else sums_scratch(*product, padded(rows))
            )
            return [
                *sums,
                transposed_scratch(rows, inner),
                transposed_scratch(rows, columns),
                ((parts, columns), torch.float32),
                ((columns,), torch.float32),
                *made,
            ]
        dtype = self._product_dtype
        operands = [
            *converted_scratch(self.x.tensor, dtype),
            *converted_scratch(self.floats, dtype),
        ]
        return [*sums, (product, torch.float32), *operands]

    def cuda(self, *scratch):
        if self._float_mode:
            return (
                [self._floats(self.floats, self.x.floats, self.dweight)]
                if self.rows
                else [zero(self.dweight)]
            )
        sums, *scratch = scratch if self.parts is None else (self.parts, *scratch)
        check_parts(sums, self._clip_sums)
        if self.gradient is not None:
            entries = self._int8_entries(sums, *scratch)
        else:
            entries = self._float_entries(sums, iter(scratch))
        if self._leaves_no_sums:
            return entries
        return [
            *entries,
            *finish(sums_of_clips(sums, self.clips, self.dclip), leaves=self.parts is not None),
        ]

    def _floats(self, gradient, x, out) -> Product:
        """gradient [M, N] and x [M, K] -> out [N, K], or [K, N]."""
        a, b = (x, gradient) if self.weight.in_out else (gradient, x)
        return Product(a=a, b=b, out=out, transpose_a=True, transpose_b=True)

    def _int8_entries(self, sums, gradient, x, largest, scale, *made):
        """Both operands transposed, x rounded once more with a scale for each column, their product
        and its end."""
        inner, columns, tile = self._upstream.shape[1], self.columns, self._tile
        check_columns(
            16, **{"the width of a weight": columns, "the width of its gradient's operand": inner}
        )
        parts, width = len(largest), x.shape[1]
        (down, along), (_, strips) = tiles(width, inner), tiles(width, columns)
        operands = [
            launch(
                "transpose.cu",
                "lsq_begin_weight_gradient",
                self,
                gradient,
                largest,
                parts,
                inner,
                width,
                grid=parts * strips + down * along,
            ),
            launch(
                "transpose.cu",
                "lsq_round_transposed",
                self,
                largest,
                scale,
                x,
                parts,
                width,
                grid=(down, strips),
            ),
        ]
        if tile is not None:
            parts = made[0] if made else None
            return [
                *operands,
                weight_gradient_product(self, tile, (gradient, x, scale), sums, parts),
            ]
        pair = (x, gradient) if self.weight.in_out else (gradient, x)
        return [*operands, *int8_products(*pair, *made, op=GEMM), self._end(made[-1], scale, sums)]

    def _end(self, product, column_scale, sums):
        """The kernel on rows; the gradients of clips for rows are whole there."""
        if self.weight.in_out:
            return end_in_out(self, product, column_scale, sums)
        per_channel = self.clips > 1 and self.dclip is not None
        return launch(
            "weight_gradient.cu",
            "lsq_project_weight_gradient",
            self,
            product if self.rows else None,
            column_scale,
            self.dclip if per_channel else sums,
            grid=row_blocks(self.weight_rows, self.columns, most=MANY_BLOCKS),
            SUMS=0 if self.gradient is None else SUMS[product.dtype],
            FLOAT=0,
            **row_defines(self.columns),
        )

    def _float_entries(self, sums, scratch):
        product, dtype = next(scratch), self._product_dtype
        values, x = converted(
            self.x.tensor, None if self.x.coded is None else self.x.scale, dtype, scratch
        )
        gradients, gradient = converted(self.floats, None, dtype, scratch)
        products = [*values, *gradients, self._floats(gradient, x, product)] if self.rows else []
        return [*products, self._end(product, None, sums)]
