"""Launches of lsq.ops.coarsen."""

from lsq.native.geometry import THREADS, VECTOR
from lsq.native.launch import launch
from lsq.ops.coarsen import CoarsenRows
from lsq.ops.launches import check_columns
from lsq.program.cuda import launches


@launches.register(CoarsenRows)
def launch_coarsen_rows(op: CoarsenRows):
    check_columns(VECTOR, **{"the width of what is rounded": op.columns})
    grid = max(1, -(-op.codes.numel() // (VECTOR * THREADS)))
    return launch("coarsen.cu", "lsq_coarsen_rows", op, grid=grid)
