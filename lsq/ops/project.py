"""A product with a weight and its epilogue: scale, bias, activation, dropout, rounding.

    y = x weight^T + bias;   result = dropout(activation(y)), as floats or rounded once to codes

or, in a graph layer, row_factor * x weight^T, rounded or not.

A product of codes has exact int32 sums; one factor for each column makes floats of them. The
ProjectInputGradient of the product that reads the result undoes this epilogue. Kept for it: a bit
for each element for ReLU, the slope as int8 for GELU and SiLU. M rows, K inputs, P outputs.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native import loader
from lsq.native.launch import FLOATS, check
from lsq.ops.fake_quantize import packed_groups
from lsq.ops.gated import Gated
from lsq.ops.grouped_product import GroupedCodes
from lsq.ops.nonlinearity import Nonlinearity, epilogue
from lsq.ops.rounding import Round, RoundGradient, unpacked
from lsq.ops.weight_gradient import append_gradients
from lsq.program.declare import Activations, Floats, Host, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Rows, Weight

GEMM = "project"  # Name of the product of codes in lsq.gemm.


class Project(Operation):
    """dropout(activation(x weight^T + bias)) [M, P] of codes, or of floats in float mode."""

    x: In[Rows]  # [M, K]
    weight: In[Weight]
    """[P, K]; on CUDA also [P, (K + 31) // 32 * 17] as int4, [P, S, B] as Fields; in float mode its
    values."""
    groups: In[GroupedCodes] | None
    """[M, K], codes of x for a grouped weight, on the CPU."""
    bias: In[Floats] | None  # [P]
    row_factor: In[Floats] | None
    """[M], of each row, without bias and nonlinearity; only an Aggregate may read the result."""
    out: Out[Activations] | None  # [M, P]; from codes float32 or bfloat16, on the CPU too.
    rounded: Out[Coded] | None  # [M, P]; from codes, with P a multiple of 8.
    nonlinearity: Out[Nonlinearity] | None  # Activation and dropout, between bias and rounding.
    accumulates: Host[bool] = False
    """Whether this product only adds to x's gradient, which an earlier reader of x finishes."""

    rows = extent(0, "x.tensor")
    columns = extent(0, "weight")  # P.

    def __post_init__(self):
        check(
            self.row_factor is None or (self.bias is None and self.nonlinearity is None),
            "a product with row_factor has a bias, an activation or dropout; put it behind the sums"
            " over neighbours",
        )

    @size
    def out_dtype(self) -> int:
        return 0 if self.out is None else FLOATS[self.out.dtype]

    @property
    def product_weight(self) -> Weight:
        return self.weight

    @property
    def product_bias(self):
        return self.bias

    @property
    def has_epilogue(self) -> bool:
        return any(one is not None for one in (self.bias, self.row_factor, self.nonlinearity))

    @property
    def multiplies_fields(self) -> bool:
        """Whether floats are multiplied by packed fields."""
        return self.weight.grouped is not None and self.weight.decoded is None

    def reference(self):
        if self.groups is not None:
            y = self.groups.decode() @ packed_groups(self.weight).values().t()
        elif self.multiplies_fields:
            y = self.x.floats @ packed_groups(self.weight).values().t()
        elif self.x.coded is None:
            y = self.x.floats @ self.weight.floats_by_rows.t()
        else:
            codes = self.weight.format.unpack(self.weight.codes, self.x.tensor.shape[1])
            y = gemm.reference(self.x.tensor, codes).float() * (self.x.scale * self.weight.scale)
        y = y if self.row_factor is None else y * self.row_factor[:, None]
        return epilogue(y if self.bias is None else y + self.bias, self.nonlinearity, self.rounded)

    def cpu_scratch(self):
        if self.x.coded is None:
            return []
        return [gemm.scratch_for(GEMM, self.rows, *self.weight.codes.shape)]

    def cpu(self, *scratch):
        if self.x.coded is None:
            if self.groups is not None:
                loader.call("lsq_multiply_groups", self, packed_groups(self.weight))
            elif self.multiplies_fields:
                loader.call("lsq_multiply_floats", self, packed_groups(self.weight))
            else:
                torch.mm(self.x.floats, self.weight.floats_by_rows.t(), out=self.out)
            if self.has_epilogue:
                loader.call("lsq_end_floats", self)
            return
        if self.rows == 0:  # the epilogue still writes the scale
            loader.call("lsq_end_long_project", self, None, 0, 0)
            return
        gemm.multiply(GEMM, self, self.x.tensor, self.weight.codes, *scratch)

    def gradient(self, builder) -> None:
        upstream = self._upstream(builder)
        if upstream == (None, None):
            return
        source, weight = self.x.tensor, unpacked(builder, self.weight)
        if self.accumulates:
            accumulated, dx = builder.accumulate_into(source)
            end = {"undoes": False, "accumulated": accumulated, "dx": dx}
            append_gradients(builder, self, weight, upstream, **end)
            return
        producer = builder.producer(source)
        end = {"nonlinearity": getattr(producer, "nonlinearity", None)}
        if isinstance(producer, Project):
            check(
                producer.row_factor is None,
                f"{source.name} has a row_factor, which only the gradient of an Aggregate undoes",
            )
            end["dx"], end["rounded"] = builder.product_gradient(source)
            end["sum"] = builder.bias_gradient(source)
        else:
            dtype = self._dtype_for(producer, builder)
            end["dx"] = builder.tensor("d_" + source.name, source.shape, dtype)
            end["added"] = builder.take_gradient(source)
            builder.accumulate(source, end["dx"])
        end["accumulated"] = builder.take_accumulated(source)
        append_gradients(builder, self, weight, upstream, **end)

    def _dtype_for(self, producer, builder) -> torch.dtype:
        """Return the dtype in which the operation that made x reads its gradient."""
        if isinstance(producer, Round):
            return producer.x.dtype
        either = isinstance(producer, Gated) and producer.rounded is not None
        return builder.narrow if either and builder.quant.backward == "int8" else torch.float32

    def _upstream(self, builder) -> tuple[torch.Tensor | None, RoundedGradient | None]:
        """Return the gradient of the product, float or rounded; append the gradient of the bias."""
        result = self.out if self.rounded is None else self.rounded.codes
        arrived = builder.gradient_of(result)
        if arrived is None:  # the reader of the result has undone the epilogue
            return builder.product_gradient_of(result)
        ends = (self.nonlinearity, self.row_factor, self.rounded)
        if any(one is not None for one in ends):
            raise ValueError(
                f"the gradient of {result.name} comes from outside, where nothing undoes its"
                " activation, dropout, row_factor or rounding: a product at the end of a program"
                " has none"
            )
        rounded = None
        if self.x.coded is not None and builder.quant.backward == "int8":
            name = "d_" + result.name + ".rounded"
            rounded = builder.rounded_gradient(name, result.shape, self.weight.scale)
        dbias = builder.parameter_gradient(self.bias)
        if rounded is not None or dbias is not None:
            builder.add(RoundGradient(gradient=arrived, rounded=rounded, sum=dbias))
        return (arrived, None) if rounded is None else (None, rounded)
