"""Launches of lsq.ops.gated."""

import torch

from lsq.native import geometry
from lsq.native.geometry import MANY_BLOCKS, THREADS, VECTOR, row_defines
from lsq.native.launch import FLOATS, TICKET, float_define, launch
from lsq.ops.gated import Gated, GatedGradient
from lsq.ops.launches import check_columns, started
from lsq.ops.sums_cuda import KernelSums, gradient_sums
from lsq.program.cuda import kernel_sums, launches

VECTORS = 2  # Vectors of 8 values that a thread of lsq_gated computes.


@launches.register(Gated)
def launch_gated(op: Gated):
    check_columns(VECTOR, **{"the width of a gate": op.columns})
    if op.rounded is not None and op.rounded.by_row:
        grid, line = geometry.strided(op.rows, MANY_BLOCKS), 4 * op.columns
        return [
            launch("gated.cu", "lsq_gated_rows", op, grid=grid, shared=line, **_defines(op, op.out))
        ]
    return launch(
        "gated.cu",
        "lsq_gated",
        op,
        TICKET,
        grid=max(1, -(-op.count // (VECTORS * VECTOR * THREADS))),
        **_defines(op, op.out),
        **started(op.rounded),
    )


@kernel_sums.register(GatedGradient)
def sums_of_gated_gradient(op: GatedGradient) -> list[KernelSums]:
    sides = (op.gate, op.dgate), (op.up, op.dup)
    return [gradient_sums(end, op.rows, op.columns, rows.coded) for rows, end in sides]


@launches.register(GatedGradient)
def launch_gated_gradient(op: GatedGradient, *scratch):
    left, entries = iter(scratch), []
    for number, sums in enumerate(kernel_sums(op)):
        partial, end = sums.take(left), sums.holder
        kernel = launch(
            "gated_gradient.cu",
            "lsq_gated_gradient",
            op,
            partial,
            grid=len(partial),
            UP=number,
            ROUNDED=int(end.rounded is not None),
            **_defines(op, op.gradient, end.floats),
            **row_defines(op.columns),
        )
        entries += [kernel, *sums.finish(partial)]
    return entries


def _defines(op: Gated | GatedGradient, *floats: torch.Tensor | None) -> dict[str, int]:
    """Return the -D definitions of the kernel."""
    found = [one for one in (op.gate.floats, op.up.floats, *floats) if one is not None]
    defines = float_define(*found) if found else {"FLOAT": FLOATS[torch.float32]}
    return {"ACTIVATION": int(op.activation), "CODED": int(op.gate.coded is not None), **defines}
