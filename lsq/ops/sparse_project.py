"""A product with a 2:4 sparse weight and its end, without a backward pass: for the few rows of
decoding on CUDA.

    y = x weight^T + bias;   result = activation(y), as floats or rounded once to codes

The integers are those of Project. M rows, K inputs, P outputs.
"""

from __future__ import annotations

from lsq import gemm
from lsq.gemm.configuration import MOST_TILE_ROWS
from lsq.native.launch import TICKET, check, float_define, launch
from lsq.ops.kernels import check_columns
from lsq.ops.nonlinearity import Nonlinearity, epilogue
from lsq.ops.scales import started
from lsq.ops.sparse_weight import OUTPUTS, SparseWeight
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded, Rows

ROWS, THREADS = 32, 128
"""Of a block of the kernel."""
MOST_ROWS = 128
"""Up to which decoding takes this kernel: the weight is read again for each 32 rows."""


class SparseProject(Operation):
    """activation(x weight^T + bias) [M, P] of codes; fields are those of Project."""

    x: In[Rows]
    """[M, K], codes."""
    weight: In[SparseWeight]
    """[P, K]"""
    bias: In[Floats] | None
    """[P]"""
    out: Out[Activations] | None
    """[M, P]"""
    rounded: Out[Coded] | None
    """[M, P], without bits or errors for a backward pass."""
    nonlinearity: Out[Nonlinearity] | None
    """An activation alone."""

    rows = extent(0, "x.tensor")
    columns = extent(0, "weight.scale")
    """P."""

    def reference(self):
        y = gemm.reference(self.x.tensor, self.weight.codes()).float() * (
            self.x.scale * self.weight.scale
        )
        return epilogue(y if self.bias is None else y + self.bias, self.nonlinearity, self.rounded)

    def cpu_scratch(self):
        check(
            False,
            "SparseProject runs on CUDA; on the CPU take PackedProject with PackedWeight.of_sparse",
        )

    def cuda(self):
        inner, end = self.weight.inner, self.nonlinearity or Nonlinearity()
        check_columns(
            OUTPUTS,
            **{"the inner width of an int8 product": inner, "its outer width": self.columns},
        )
        blocks = max(1, -(-self.rows // ROWS))
        check(
            blocks <= MOST_TILE_ROWS,
            f"{self.rows} rows are more than {MOST_TILE_ROWS * ROWS}: take smaller batches",
        )
        return [
            launch(
                "sparse_project.cu",
                "lsq_sparse_project",
                self,
                inner,
                TICKET,
                grid=(self.columns // OUTPUTS, blocks),
                block=THREADS,
                ACTIVATION=int(end.activation),
                **started(self.rounded),
                **({} if self.out is None else float_define(self.out)),
            )
        ]
