"""Launches of lsq.ops.residual_norm."""

from lsq.native.geometry import MANY_BLOCKS, row_blocks, row_defines, sums_in_shared_memory
from lsq.native.launch import TICKET, float_define, launch
from lsq.ops.launches import started
from lsq.ops.residual_norm import ResidualNorm, ResidualNormGradient
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import KernelSums, parts_of
from lsq.program.cuda import kernel_sums, launches


@launches.register(ResidualNorm)
def launch_residual_norm(op: ResidualNorm):
    return launch(
        "residual_norm.cu",
        "lsq_residual_norm",
        op,
        TICKET,
        grid=row_blocks(op.rows, op.columns, most=MANY_BLOCKS),
        **float_define(*op.sum.tensors, op.out),
        **row_defines(op.columns),
        **started(op.rounded),
    )


@kernel_sums.register(ResidualNormGradient)
def sums_of_residual_norm_gradient(op: ResidualNormGradient) -> list[KernelSums]:
    def of(parts) -> PartialSums:
        totals = [getattr(op, name) for name in op.norm_sums]
        totals += [op.sum.dupdate_sum] if op.sum.updated else []
        return PartialSums.of(parts, op.columns, totals)

    spec = parts_of(op.rows, op.columns, len(op.norm_sums) + op.sum.updated)
    return [KernelSums(op, spec, of, ("dweight", "dbias", "sum.dupdate_sum"))]


@launches.register(ResidualNormGradient)
def launch_residual_norm_gradient(op: ResidualNormGradient, *scratch):
    down, sums = op.sum, len(op.norm_sums)
    if not (sums or down.updated):
        return []
    (over_rows,) = kernel_sums(op)
    parts = over_rows.take(iter(scratch))
    kernel = launch(
        "residual_norm.cu",
        "lsq_residual_norm_gradient",
        op,
        parts,
        grid=len(parts),
        shared=sums_in_shared_memory(op.columns, sums),
        NORM_SUMS=sums,
        NORMALISED=int(op.normalised is not None),
        PRODUCT=int(down.updated),
        ROUNDED=int(down.rounded is not None),
        **float_define(op.dout, op.z, *down.tensors),
        **row_defines(op.columns),
    )
    return [kernel, *over_rows.finish(parts)]
