"""The gradient of a weight, and of its clip. Under backward="int8":

    dweight[n, k] = x_scale * (1 / weight_scale[n]) * sum_m codes[m, n] * (scale[m] * x[m, k])

x is multiplied by the row scales and rounded again, at random, with a scale for each column. So one
int8 gradient, which includes the weight's scales, serves both backward products (see
RoundedGradient). The straight-through mask is |weight| <= clip. M rows, N outputs of the weight,
padded to P in its codes, K columns.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native import loader
from lsq.ops.fake_quantize import fake_gradient
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.sums import PartialSums
from lsq.program.declare import (
    Activations,
    Floats,
    In,
    Indices,
    Out,
    Parameters,
    extent,
    factor,
    size,
)
from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from lsq.program.values import RoundedGradient, Rows, Weight
from lsq.quant import arithmetic

GEMM = "project_weight_gradient"  # Name of the product of codes in lsq.gemm.


class ProjectWeightGradient(Operation):
    """The gradient of the weight [N, K] of a Project, before its rounding, and of its clip."""

    gradient: In[RoundedGradient] | None  # [M, P], under backward="int8".
    floats: In[Activations] | None  # [M, P], under another `backward`; [M, N] in float mode.
    x: In[Rows]  # [M, K]
    weight: In[Weight]  # [P, K]; in float mode it has no codes.
    key: In[Indices] | None  # [1], key of the random numbers under backward="int8".
    subsequence: int = 0
    learned_step: bool = False  # Whether LSQ (learned step size) trains the clip, not PACT.
    dweight: Out[Parameters]  # [N, K], or [K, N] like the weight; in the weight's dtype.
    dclip: Out[Floats] | None  # [N] or [1], like the clip.
    parts: Out[Floats] | None  # Parts of `dclip`, in its place; see lsq.ops.sums.

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
        if not self.learned_step:
            return 1.0
        count = self.weight_rows * self.columns // self.clips
        return arithmetic.lsq_factor(count, self.weight.format.bits)

    @property
    def upstream(self) -> torch.Tensor:
        return self.floats if self.gradient is None else self.gradient.codes

    @property
    def float_mode(self) -> bool:
        return self.weight.codes is None and self.weight.clip is None

    def reference(self):
        if self.float_mode:
            return {"dweight": self._as_held(self.floats.t() @ self.x.floats)}
        if self.gradient is None:
            x = self.x.floats if self.x.coded is None else self.x.coded.decode()
            product = self.floats.float().t() @ x.float()
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
        return {
            "dweight": self._as_held(dweight).to(self.weight.values.dtype),
            "dclip": dclip,
            "parts": PartialSums.of_clips(self.parts, self.clips, dclip).as_parts(),
        }

    def _as_held(self, dweight: torch.Tensor) -> torch.Tensor:
        return dweight.t() if self.weight.in_out else dweight

    def _straight_through(self, product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product [N, K] under the mask |weight| <= clip, and the clip's gradient."""
        clip = self.weight.clip
        if self.weight.absmax:
            return product, torch.zeros_like(clip)
        weight, limit = self.weight.values_by_rows, clip.reshape(-1, 1)
        outside = weight.abs() > limit
        contribution = torch.where(outside, product * weight.sign(), 0.0)
        if self.learned_step:
            rows = slice(self.weight_rows)
            decoded = self.weight.codes[rows].to(torch.float32) * self.weight.scale[rows, None]
            inside = product * (decoded - weight) / limit
            contribution = torch.where(outside, contribution, inside) * self.clip_factor
        dclip = contribution.reshape(clip.shape[0], -1).sum(dim=1)
        return torch.where(outside, 0.0, product), dclip

    def cpu_scratch(self):
        if self.float_mode:
            return []
        (rows, inner), columns = self.upstream.shape, self.columns
        sums, x = ((self.weight_rows,), torch.float32), (rows, columns)
        if self.gradient is not None:
            memory = gemm.scratch_for(GEMM, inner, columns, rows)
            return [sums, (x, torch.int8), ((columns,), torch.float32), memory]
        product = (inner, columns)
        if self.x.coded is None:
            return [sums, (product, torch.float32)]
        return [sums, (product, torch.float32), (x, torch.float32)]

    def cpu(self, *scratch):
        if self.float_mode:
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
            product, floats = scratch
            torch.mul(self.x.tensor, self.x.scale, out=floats)
            torch.mm(self.floats.t(), floats, out=product)
            loader.call("lsq_end_float_weight_gradient", self, product, sums)
        else:
            codes, column_scale, memory = scratch
            gradient = self.gradient.codes.t()
            if gemm.is_long(GEMM, self.rows):  # else packing rounds each tile
                loader.call("lsq_round_columns", self, codes, column_scale)
            gemm.multiply(GEMM, self, gradient, codes.t(), memory, column_scale, sums)
        loader.call("lsq_finish_weight_gradient", self, sums)


def append_gradients(
    builder, product, weight: Weight, upstream: tuple, *, undoes: bool = True, **end
) -> VirtualTensor | None:
    """Append the gradients of input and weight to a Builder; return the weight's, or None.

    Args:
        product: a Project or a Prediction, with Rows x [M, K].
        weight: [N, K], as products read it.
        upstream: the product's gradient [M, P] as (floats, None) or (None, RoundedGradient).
        undoes: whether the rounding of x is undone here, not by another product of x.
        end: fields of ProjectInputGradient: the tensor of its result, and its epilogue.
    """
    x, (floats, rounded) = product.x.coded, upstream
    if x is None:
        floats = fake_gradient(builder, floats, builder.quant.gradient_form(weight.values.name))
    common = {"gradient": rounded, "floats": floats}
    if builder.needs_gradient(product.x.tensor):
        if undoes:
            end |= {"x": x, "dclip": builder.parameter_gradient(product.x.clip)}
        builder.add(ProjectInputGradient(weight=weight.bare(), **common, **end))
    if not (builder.needs_gradient(weight.values) or builder.needs_gradient(weight.clip)):
        return None
    if rounded is not None:
        common |= {"key": builder.key, "subsequence": builder.next_subsequence()}
    dweight = builder.parameter_gradient(weight.values)
    if dweight is None:  # only the clip needs a gradient
        dweight = builder.like("d_" + weight.values.name, weight.values)
    builder.add(
        ProjectWeightGradient(
            x=product.x.bare(),
            weight=weight,
            learned_step=builder.quant.clip_gradient == "lsq",
            dweight=dweight,
            dclip=builder.parameter_gradient(weight.clip),
            **common,
        )
    )
    return dweight
