"""Launches of lsq.ops.grouped_product."""

from lsq.gemm.configuration import TileConfiguration
from lsq.ops.grouped_product import GroupedProduct
from lsq.ops.launches import tiled, zero
from lsq.program.cuda import launches

FEW_ROWS = 64
"""Rows of a GPU's tile for so many or fewer; else it has twice as many."""


@launches.register(GroupedProduct)
def launch_grouped_product(op: GroupedProduct):
    if not min(op.rows, op.inner):
        return [zero(op.out)]
    tile = TileConfiguration(
        rows=FEW_ROWS if op.rows <= FEW_ROWS else 2 * FEW_ROWS, columns=64, stages=4
    )
    shape = op.rows, op.columns, op.inner
    return [tiled("grouped_product.cu", "lsq_grouped_product", tile, shape, op, GROUP=op.b.group)]
