"""Launches of lsq.ops.aggregate."""

from lsq.native.geometry import MANY_BLOCKS, VECTOR, row_blocks, row_defines
from lsq.native.launch import TICKET, float_define, launch
from lsq.ops.aggregate import Aggregate, AggregateGradient
from lsq.ops.launches import check_columns, started
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import KernelSums, parts_of
from lsq.program.cuda import kernel_sums, launches


@launches.register(Aggregate)
def launch_aggregate(op: Aggregate):
    check_columns(VECTOR, **{"the width of what is summed over neighbours": op.columns})
    end, rows = op.nonlinearity or Nonlinearity(), row_defines(op.columns)
    strips = -(-op.columns // (VECTOR * rows["LANES"]))  # a block's share of the columns
    given = (op.x.floats, op.root, end.before, op.out)
    floats = [tensor for tensor in given if tensor is not None]
    return launch(
        "aggregate.cu",
        "lsq_aggregate",
        op,
        TICKET,
        grid=(row_blocks(op.rows, op.columns, most=MANY_BLOCKS), strips),
        ACTIVATION=int(end.activation),
        CODED=int(op.x.coded is not None),
        **(float_define(*floats) if floats else {}),
        **rows,
        **started(op.rounded),
    )


@kernel_sums.register(AggregateGradient)
def sums_of_aggregate_gradient(op: AggregateGradient) -> list[KernelSums]:
    def of(parts) -> PartialSums:
        return PartialSums.of(parts, op.columns, (op.sum,), op.dclip, op.x)

    check_columns(VECTOR, **{"the width of a gradient summed over neighbours": op.columns})
    return [KernelSums(op, parts_of(op.rows, op.columns), of, ("sum", "dclip"))]


@launches.register(AggregateGradient)
def launch_aggregate_gradient(op: AggregateGradient, *scratch):
    (over_rows,) = kernel_sums(op)
    parts = over_rows.take(iter(scratch))
    kernel = launch(
        "aggregate.cu",
        "lsq_aggregate_gradient",
        op,
        parts,
        grid=len(parts),
        ROUNDED=int(op.rounded is not None),
        **float_define(op.gradient, op.dx),
        **row_defines(op.columns),
    )
    return [kernel, *over_rows.finish(parts)]
