"""A product with a packed weight and its epilogue, without a backward pass: decoding on the CPU.

    y = x weight^T + bias;   result = activation(y), as floats or rounded once to codes

All threads share the outputs, so that one row keeps them busy. M rows, K inputs, P outputs.
"""

from __future__ import annotations

from lsq import gemm
from lsq.ops.nonlinearity import Activation, Nonlinearity, epilogue
from lsq.ops.packed_weight import PackedWeight
from lsq.program.declare import Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded


class PackedProject(Operation):
    """The product activation(x weight^T + bias) [M, P] of codes."""

    x: In[Coded]  # [M, K]
    weight: In[PackedWeight]  # [P, K]
    bias: In[Floats] | None  # [P]
    activation: Activation = Activation.none
    out: Out[Floats] | None  # [M, P]
    rounded: Out[Coded] | None  # [M, P], without `clipped` and `error`.

    rows = extent(0, "x.codes")

    def reference(self):
        sums = gemm.reference(self.x.codes, self.weight.codes()).float()
        y = sums * (self.x.scale_of_codes * self.weight.scale)
        y = y if self.bias is None else y + self.bias
        return epilogue(y, Nonlinearity(activation=self.activation), self.rounded)
