"""A product with a weight and its end: scale, bias, activation, dropout, rounding.

    y = x weight^T + bias;   result = dropout(activation(y)), as floats or rounded once to codes

Of codes, the product is exact int32 sums; they become floats by one factor for each column. The backward pass undoes
the end of a product in the operation that makes its gradient (ProjectInputGradient of the product that reads it), from
what is kept here: a bit an element for ReLU, the slope as int8 for GELU. M rows, K inputs, P outputs.
GELU is the exact one, x * Phi(x) (Hendrycks & Gimpel 2016).
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch

from lsq import gemm
from lsq.csrc import loader
from lsq.csrc.geometry import VECTOR, patches
from lsq.csrc.launch import TICKET, Product, float_define, launch
from lsq.ops.kernels import check_columns
from lsq.ops.products import converted, converted_scratch, int8_products
from lsq.ops.rounding import RoundGradient, unpacked
from lsq.program.declare import Activations, Bits, Codes, Floats, In, Out, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, RoundedGradient, Weight, dropped
from lsq.quant import pack_bits

GEMM = "project"
"""What lsq.gemm calls the product of codes."""
SLOPE_UNIT = 112
"""|gelu'| < 1.13: the slope times this, rounded, is an int8 (csrc/arithmetic.h: kSlopeUnit)."""


class Activation(IntEnum):
    """What is applied to a product."""

    none = 0
    relu = 1
    gelu = 2


class Project(Operation):
    """dropout(activation(x weight^T + bias)) [M, P] of codes, or of floats in float mode."""

    x: In[Coded] | None
    """[M, K]"""
    floats: In[Activations] | None
    """[M, K], in the place of x in float mode: the product is then one of floats, with the weight's values."""
    weight: In[Weight]
    """[P, K]"""
    bias: In[Floats] | None
    """[P]"""
    activation: Activation = Activation.none
    dropout: In[Dropout] | None
    out: Out[Activations] | None
    """[M, P]; of floats, always."""
    rounded: Out[Coded] | None
    """[M, P]; of codes, P is a multiple of 8."""
    positive: Out[Bits] | None
    """y > 0, for the backward pass of ReLU."""
    slope: Out[Codes] | None
    """[M, P], gelu'(y) * SLOPE_UNIT, rounded; 0 for NaN."""
    before: Out[Activations] | None
    """[M, P], y, for the backward pass of GELU in float mode."""

    @size
    def rows(self) -> int:
        return self._operand.shape[0]

    @size
    def columns(self) -> int:
        """P."""
        return self._matrix.shape[0]

    @property
    def product_weight(self) -> Weight:
        return self.weight

    @property
    def product_bias(self):
        return self.bias

    @property
    def _operand(self) -> torch.Tensor:
        return self.floats if self.x is None else self.x.codes

    @property
    def _matrix(self) -> torch.Tensor:
        return self.weight.values if self.x is None else self.weight.codes

    @property
    def _ends(self) -> bool:
        """Whether anything is done to a product of floats."""
        wanted = self.bias, self.dropout, self.positive, self.slope, self.before
        return self.activation is not Activation.none or any(one is not None for one in wanted)

    def _product(self) -> torch.Tensor:
        """y."""
        if self.x is None:
            y = self.floats @ self.weight.values.t()
        else:
            y = gemm.reference(self.x.codes, self.weight.codes).float() * (self.x.scale * self.weight.scale)
        return y if self.bias is None else y + self.bias

    def _result(self, y: torch.Tensor) -> torch.Tensor:
        if self.activation is Activation.relu:
            y = y.clamp_min(0.0)
        elif self.activation is Activation.gelu:
            y = torch.nn.functional.gelu(y)
        return dropped(y, self.dropout)

    def reference(self):
        y = self._product()
        result = self._result(y)
        density = torch.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + torch.erf(y / math.sqrt(2))) + y * density
        codes = (slope * SLOPE_UNIT).round().nan_to_num(nan=0.0).to(torch.int8)
        rounded = self.rounded.encode(result) if self.rounded is not None else (None,) * 4
        return result, *rounded, pack_bits(y > 0), codes, y

    def cpu_scratch(self):
        return [] if self.x is None else [gemm.scratch_for(GEMM, self.rows, *self.weight.codes.shape)]

    def cpu(self, *scratch):
        if self.x is None:
            torch.mm(self.floats, self.weight.values.t(), out=self.out)
            if self._ends:
                loader.call("lsq_end_floats", self)
            return
        if self.rows == 0:  # there is a scale to write
            loader.call("lsq_end_sums", self, None, 0, 0)
            return
        for first, sums in gemm.row_blocks(GEMM, self.x.codes, self.weight.codes, *scratch):
            loader.call("lsq_end_sums", self, sums, first, len(sums))

    def cuda_scratch(self):
        if self.x is None:
            return converted_scratch(self.weight.values, self.floats.dtype)
        return [((self.rows, self.columns), torch.int32)]

    def cuda(self, *scratch):
        if self.x is not None:
            return [*int8_products(self.x.codes, self.weight.codes, *scratch), self._end(*scratch)]
        if self.rows == 0:
            return []
        conversion, weight = converted(self.weight.values, None, self.floats.dtype, iter(scratch))
        product = Product(a=self.floats, b=weight, out=self.out)
        return [*conversion, product, *([self._end(None)] if self._ends else [])]

    def _end(self, sums):
        check_columns(VECTOR, **{"the width of a product with an end": self.columns})
        floats = [tensor for tensor in (self.floats, self.out, self.before) if tensor is not None]
        return launch(
            "project.cu", "lsq_end", self, sums, TICKET, grid=patches(self.rows, self.columns),
            ACTIVATION=int(self.activation), SUMS=int(sums is not None), **(float_define(*floats) if floats else {}),
        )

    def gradient(self, builder) -> None:
        # They import this module.
        from lsq.ops.input_gradient import ProjectInputGradient
        from lsq.ops.weight_gradient import ProjectWeightGradient

        floats, rounded = self._upstream(builder)
        if floats is None and rounded is None:
            return
        coded = self.x is not None
        dtype = builder.quant.backward_dtype if coded and rounded is None else "float32"
        source, weight = self._operand, unpacked(builder, self.weight)
        end, producer = {}, builder.producer(source)
        if isinstance(producer, Project):
            kept = ("activation", "dropout", "positive", "slope", "before")
            end = {name: getattr(producer, name) for name in kept}
            end["dx"], end["rounded"] = builder.product_gradient(source)
            end["sum"] = builder.bias_gradient(source)
        else:
            end = {"added": builder.take_gradient(source), "dx": builder.tensor("d_" + source.name, source.shape)}
            builder.accumulate(source, end["dx"])
        builder.add(
            ProjectInputGradient(
                gradient=rounded, floats=floats, weight=weight.bare() if coded else weight, x=self.x,
                dclip=builder.parameter_gradient(self.x.clip) if coded else None, dtype=dtype, **end,
            )
        )
        random = {} if rounded is None else {"key": builder.key, "subsequence": builder.next_subsequence()}
        builder.add(
            ProjectWeightGradient(
                gradient=rounded, floats=floats, x=self.x, x_floats=self.floats, weight=weight,
                lsq=builder.quant.clip_gradient == "lsq", dweight=builder.parameter_gradient(self.weight.values),
                dclip=builder.parameter_gradient(self.weight.clip), dtype=dtype, **random,
            )
        )

    def _upstream(self, builder) -> tuple[torch.Tensor | None, RoundedGradient | None]:
        """The gradient of the product, as floats or rounded; that of the bias is taken care of.

        Raises:
            ValueError: the result leaves the program, or is read by what knows nothing of products, after an end that
                only a product's reader can undo.
        """
        result = self.out if self.rounded is None else self.rounded.codes
        arrived = builder.gradient_of(result)
        if arrived is None:  # whoever reads the result has undone its end
            return builder.product_gradient_of(result)
        if self.activation is not Activation.none or self.dropout is not None or self.rounded is not None:
            raise ValueError(
                f"the gradient of {result.name} comes from outside, where nothing undoes its activation, dropout or "
                "rounding: a product at the end of a program has neither"
            )
        rounded = None
        if self.x is not None and builder.quant.backward == "int8":
            rounded = builder.rounded_gradient("d_" + result.name + ".rounded", result.shape, self.weight.scale)
        dbias = builder.parameter_gradient(self.bias)
        if rounded is not None or dbias is not None:
            builder.add(RoundGradient(gradient=arrived, rounded=rounded, sum=dbias))
        return (arrived, None) if rounded is None else (None, rounded)
