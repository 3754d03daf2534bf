"""Launches of lsq.ops.adam."""

import torch

from lsq.native.launch import TICKET, Launch, launch
from lsq.ops.adam import Adam, AdamSteps, GradientNorm, Table
from lsq.ops.launches import check_columns
from lsq.program.cuda import launches, scratch_of


@launches.register(Adam)
def launch_adam(op: Adam):
    check_cuda(op)
    blocks = max(1, op.blocks)
    if op.rounded is None:
        return launch("adam.cu", "lsq_adam", op, grid=blocks)
    coded = launch("adam.cu", "lsq_adam_codes", op, grid=blocks)
    return [coded, launch("adam.cu", "lsq_adam_poison", op, grid=1)] if op.clips == 1 else [coded]


def check_cuda(op: Adam) -> None:
    """Raise ValueError where kernels cannot take these shapes."""
    if op.rounded is not None:
        check_columns(16, **{"the width of a weight": op.columns})
    if op.rounded is not None and op.rounded.transposed is not None:
        check_columns(16, **{"the number of rows of a weight whose codes are transposed": op.rows})


@launches.register(AdamSteps)
def launch_adam_steps(op: AdamSteps):
    for step in op.steps:
        check_cuda(step)
    found = {"lsq_adam": op.plain, "lsq_adam_codes": op.coded, "lsq_adam_poison": op.shared}
    return [_of_table(f"{name}_table", table) for name, table in found.items() if len(table.tiles)]


@scratch_of.register(GradientNorm)
def scratch_of_gradient_norm(op: GradientNorm):
    return [((len(op.table.tiles),), torch.float32)]


@launches.register(GradientNorm)
def launch_gradient_norm(op: GradientNorm, partial):
    return [_of_table("lsq_gradient_norm", op.table, TICKET, partial, op.norm)]


def _of_table(kernel: str, table: Table, *arguments) -> Launch:
    return launch("adam.cu", kernel, table.structs, table.tiles, *arguments, grid=len(table.tiles))
