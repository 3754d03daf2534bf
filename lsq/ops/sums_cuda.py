"""Launches of lsq.ops.sums, and parts of sums that other kernels leave."""

import torch

from lsq.native.geometry import row_blocks
from lsq.native.launch import Launch, check, launch
from lsq.ops.sums import FinishSums, PartialSums, SummedGradient
from lsq.program.cuda import Spec, launches
from lsq.program.values import Coded

COLUMNS = 32
"""Columns that a block of lsq_finish_sums adds up."""
PADDING = 4
"""Columns beyond its sums that a row of parts has; the clip's stands in the first, and rows stay
16-byte aligned."""


@launches.register(FinishSums)
def launch_finish_sums(op: FinishSums):
    strips = max(_strips(partial) for partial in op.sums)
    return [launch("sums.cu", "lsq_finish_sums", op, grid=(strips, len(op.sums)))]


def finish(partial: PartialSums, leaves: bool) -> list[Launch]:
    """The launch that adds up parts at once; nothing if they are left, or no total is wanted."""
    if leaves or not partial.wanted:
        return []
    return [
        launch(
            "sums.cu",
            "lsq_finish_own_sums",
            partial.parts,
            *partial.totals,
            partial.sums,
            partial.columns,
            partial.blocks,
            partial.width,
            partial.clip_parts,
            partial.factor,
            grid=_strips(partial),
        )
    ]


def _strips(partial: PartialSums) -> int:
    """Blocks that add them up."""
    return max(1, -(-partial.sums * partial.columns // COLUMNS))


def parts_of(rows: int, columns: int, sums: int) -> Spec:
    """(shape, dtype) of the parts that a kernel on M rows leaves of `sums` sums over them."""
    return (row_blocks(rows, columns), sums * columns + PADDING), torch.float32


def check_parts(parts: torch.Tensor, wanted: Spec) -> None:
    """Refuse parts that were planned before other tuned files were named: those change the kernels.

    Raises:
        ValueError: they have another shape than `wanted`.
    """
    check(
        tuple(parts.shape) == wanted[0],
        f"parts of sums are {list(parts.shape)}, and products as they are tuned now leave"
        f" {list(wanted[0])}: name tuned files before memory is planned",
    )


def leave_gradient_sums(
    gradient: SummedGradient, tensor, rows: int, columns: int, coded: Coded | None
) -> list[PartialSums]:
    """Operation.leave_sums of one gradient."""
    name = (gradient.floats if gradient.rounded is None else gradient.rounded.codes).name
    partial = gradient.partial(tensor(name + ".parts", *parts_of(rows, columns, 1)), columns, coded)
    if not partial.wanted:
        return []
    gradient.parts, gradient.sum, gradient.clip = partial.parts, None, None
    return [partial]
