"""A product of codes and its end in one kernel, whose sums never go through memory: another way to a `Project` on CUDA.

Programs do not use it yet: `Project.cuda` multiplies by cuBLASLt. M rows, P columns, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lsq.csrc.launch import TICKET, Launch, check, float_define, launch
from lsq.ops.kernels import check_columns
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.project import Project
from lsq.ops.scales import started

THREADS = 128
"""Of a block, 2 x 2 warps (csrc/kernels/product.cuh)."""
STEP = 64
"""Values along K in a stage."""
MOST_BLOCKS = 65535
"""Of a grid's second dimension."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What a block makes, and how many steps along K it holds: -D of csrc/kernels/product.cuh.

    Raises:
        ValueError: the kernel has no such tile.
    """

    rows: int
    columns: int
    stages: int

    def __post_init__(self) -> None:
        check(
            {self.rows, self.columns} <= {64, 128} and 2 <= self.stages <= 8,
            f"{self} is no tile of the product kernel; it has 64 or 128 rows, 64 or 128 columns and 2 to 8 stages",
        )

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stages * (self.rows + self.columns) * STEP


def project_product(operation: Project, tile: Tile) -> Launch:
    """The one launch that does what a `Project` of codes does; a launch without rows writes its scale.

    Raises:
        ValueError: K or P is no multiple of 16, or there are more rows than a grid has blocks for.
    """
    inner, end = operation.x.tensor.shape[1], operation.nonlinearity or Nonlinearity()
    check_columns(16, **{"the inner width of an int8 product": inner, "its outer width": operation.columns})
    rows = max(1, -(-operation.rows // tile.rows))
    check(rows <= MOST_BLOCKS, f"{operation.rows} rows are more than {MOST_BLOCKS * tile.rows}: take smaller batches")
    return launch(
        "project_product.cu", "lsq_project_product", operation, inner, TICKET,
        grid=(-(-operation.columns // tile.columns), rows), block=THREADS, shared=tile.shared, TILE_M=tile.rows,
        TILE_N=tile.columns, STAGES=tile.stages, ACTIVATION=int(end.activation), **started(operation.rounded),
        **({} if operation.out is None else float_define(operation.out)),
    )
