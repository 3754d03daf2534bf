"""Launches of lsq.ops.rotation."""

import torch

from lsq.native.geometry import MANY_BLOCKS, VECTOR, row_blocks, row_defines
from lsq.native.launch import TICKET, Launch, check, float_define, launch
from lsq.ops.launches import started
from lsq.ops.rotation import Rotate, RotateGradient, Rotation
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import KernelSums, finish, gradient_sums, parts_of
from lsq.program.cuda import kernel_sums, launches, scratch_of
from lsq.program.operation import Spec


@launches.register(Rotate)
def launch_rotate(op: Rotate):
    return launch(
        "rotation.cu",
        "lsq_rotate",
        op,
        TICKET,
        NORMED=int(op.norms is not None),
        grid=row_blocks(op.rows, op.columns, most=MANY_BLOCKS),
        **float_define(op.x, op.out),
        **_defines(op.rotation, op.columns),
        **started(op.rounded),
    )


@kernel_sums.register(RotateGradient)
def sums_of_rotate_gradient(op: RotateGradient) -> list[KernelSums]:
    return [gradient_sums(op.dx, op.rows, op.columns, None)]


@scratch_of.register(RotateGradient)
def scratch_of_rotate_gradient(op: RotateGradient) -> list[Spec]:
    """Return memory for the bias's sums over rows; with norms, also parts and sums of columns."""
    norms = [parts_of(op.rows, op.columns), ((op.columns,), torch.float32)]
    (sums,) = kernel_sums(op)
    return [*sums.scratch, *([] if op.norms is None else norms)]


@launches.register(RotateGradient)
def launch_rotate_gradient(op: RotateGradient, *scratch):
    left, (sums,) = iter(scratch), kernel_sums(op)
    partial = sums.take(left)
    of_norms, total = (None, None) if op.norms is None else left
    kernel = launch(
        "rotation.cu",
        "lsq_rotate_gradient",
        op,
        partial,
        of_norms,
        grid=len(partial),
        NORMED=int(op.norms is not None),
        ROUNDED=int(op.dx.rounded is not None),
        **float_define(op.gradient, op.x, op.dx.floats),
        **_defines(op.rotation, op.columns),
    )
    norms = [] if op.norms is None else _finish_norms(op, of_norms, total)
    return [kernel, *sums.finish(partial), *norms]


def _finish_norms(op: RotateGradient, parts, total) -> list[Launch]:
    """Return launches that add up sums of columns, then those of all heads: each head is a row."""
    rotation, width = op.rotation, op.rotation.width
    of_columns = PartialSums.of(parts, op.columns, (total,))
    heads = total[: rotation.heads * width].view(-1, width).split([rotation.queries, rotation.keys])
    of_heads = [
        PartialSums.of(one, width, (to,))
        for one, to in zip(heads, (op.dquery, op.dkey), strict=True)
    ]
    return [launched for one in (of_columns, *of_heads) for launched in finish(one)]


def _defines(rotation: Rotation, columns: int) -> dict[str, int]:
    """Return the -D definitions of a kernel on rows of C columns."""
    check(
        rotation.width % VECTOR == 0 and rotation.rotated % (2 * VECTOR) == 0,
        f"heads of {rotation.width} columns of which {rotation.rotated} are rotated cannot run on"
        f" CUDA: the width must be a multiple of {VECTOR}, and the rotated columns of {2 * VECTOR}",
    )
    return {
        "WIDTH": rotation.width,
        "ROTATED": rotation.rotated,
        "HEADS": rotation.heads,
        **row_defines(columns),
    }
