"""A product of codes and its end in one kernel, whose sums never go through memory: another way to a `Project` on CUDA.

M rows, P columns, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lsq.csrc.launch import TICKET, Launch, check, float_define, launch
from lsq.gemm.configuration import MOST_TILE_ROWS, TileConfiguration
from lsq.ops.kernels import check_columns
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.scales import started

if TYPE_CHECKING:
    from lsq.ops.project import Project

THREADS = 128
"""Of a block, 2 x 2 warps (csrc/kernels/product.cuh)."""


def tile_defines(tile: TileConfiguration) -> dict[str, int]:
    """-D of csrc/kernels/product.cuh."""
    return {"TILE_M": tile.rows, "TILE_N": tile.columns, "STAGES": tile.stages}


def project_product(operation: Project, tile: TileConfiguration) -> Launch:
    """The one launch that does what a `Project` of codes does; a launch without rows writes its scale.

    Raises:
        ValueError: K or P is no multiple of 16, or there are more rows than a grid has blocks for.
    """
    inner, end = operation.x.tensor.shape[1], operation.nonlinearity or Nonlinearity()
    check_columns(16, **{"the inner width of an int8 product": inner, "its outer width": operation.columns})
    grid = tile.blocks(operation.rows, operation.columns)
    most = MOST_TILE_ROWS * tile.rows
    check(grid[1] <= MOST_TILE_ROWS, f"{operation.rows} rows are more than {most}: take smaller batches")
    return launch(
        "project_product.cu", "lsq_project_product", operation, inner, TICKET, grid=grid, block=THREADS,
        shared=tile.shared_bytes, **tile_defines(tile), ACTIVATION=int(end.activation), **started(operation.rounded),
        **({} if operation.out is None else float_define(operation.out)),
    )
