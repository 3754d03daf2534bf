"""Launches of lsq.ops.kept_gradient."""

from lsq.native.geometry import MANY_BLOCKS, row_blocks, row_defines
from lsq.native.launch import float_define, launch
from lsq.ops.embedding_cuda import scatter_launches, scatter_scratch
from lsq.ops.kept_gradient import KeptInputGradient, KeptWeightGradient
from lsq.ops.launches import float_operand
from lsq.program.cuda import launches, scratch_of


@launches.register(KeptInputGradient)
def launch_kept_input_gradient(op: KeptInputGradient):
    return [
        launch(
            "kept_gradient.cu",
            "lsq_kept_input_gradient",
            op,
            grid=row_blocks(op.rows, op.columns, most=MANY_BLOCKS),
            **float_define(op.dx),
            **row_defines(op.columns),
        )
    ]


@scratch_of.register(KeptWeightGradient)
def scratch_of_kept_weight_gradient(op: KeptWeightGradient):
    return scatter_scratch(op.rows, op.columns)


@launches.register(KeptWeightGradient)
def launch_kept_weight_gradient(op: KeptWeightGradient, before, ordered, partial):
    copied = [] if op.others is op.dweight else [float_operand(op.others, None, op.dweight)]
    return [*copied, *scatter_launches(op, before, ordered, partial, tables=1, KEPT=1, FLOAT=0)]
