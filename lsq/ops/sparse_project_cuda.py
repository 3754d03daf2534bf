"""Launches of lsq.ops.sparse_project."""

from lsq.gemm.configuration import MOST_TILE_ROWS
from lsq.native.launch import TICKET, check, float_define, launch
from lsq.ops.launches import check_columns, started
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.sparse_project import OUTPUTS, SparseProject
from lsq.program.cuda import launches

ROWS, THREADS = 32, 128  # Rows and threads of a block.


@launches.register(SparseProject)
def launch_sparse_project(op: SparseProject):
    inner, end = op.weight.inner, op.nonlinearity or Nonlinearity()
    check_columns(
        OUTPUTS, **{"the inner width of an int8 product": inner, "its outer width": op.columns}
    )
    blocks = max(1, -(-op.rows // ROWS))
    check(
        blocks <= MOST_TILE_ROWS,
        f"{op.rows} rows are more than {MOST_TILE_ROWS * ROWS}: take smaller batches",
    )
    return launch(
        "sparse_project.cu",
        "lsq_sparse_project",
        op,
        inner,
        TICKET,
        grid=(op.columns // OUTPUTS, blocks),
        block=THREADS,
        ACTIVATION=int(end.activation),
        **started(op.rounded),
        **({} if op.out is None else float_define(op.out)),
    )
