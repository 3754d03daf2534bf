"""A product with a packed weight and its end, without a backward pass: for decoding on the CPU.

    y = x weight^T + bias;   result = activation(y), as floats or rounded once to codes

The integers are those of Project. All threads share the weight's outputs, so that a single row
keeps all of them busy. M rows, K inputs, P outputs.
"""

from __future__ import annotations

from lsq import gemm
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.packed_weight import PackedWeight
from lsq.program.declare import Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded


class PackedProject(Operation):
    """activation(x weight^T + bias) [M, P] of codes."""

    x: In[Coded]
    """[M, K]"""
    weight: In[PackedWeight]
    """[P, K]"""
    bias: In[Floats] | None
    """[P]"""
    activation: Activation = Activation.none
    out: Out[Floats] | None
    """[M, P]"""
    rounded: Out[Coded] | None
    """[M, P], without bits or errors for a backward pass."""

    rows = extent(0, "x.codes")

    def reference(self):
        sums = gemm.reference(self.x.codes, self.weight.codes()).float()
        y = sums * (self.x.scale_of_codes * self.weight.scale)
        y = y if self.bias is None else y + self.bias
        result = Nonlinearity(activation=self.activation).apply(y)
        return result, *(self.rounded.encode(result) if self.rounded is not None else (None,) * 5)
