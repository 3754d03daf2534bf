"""What the CUDA implementations of operations share: sums that blocks leave, and launches that several need.

M rows, N columns.
"""

import torch

from lsq.csrc.geometry import VECTOR, patches, row_blocks
from lsq.csrc.launch import FLOATS, Launch, check, launch
from lsq.program.values import Coded

PADDING = 4
"""Columns beyond its sums that a partial row has: the clip's sum stands in the first; rows stay 16-byte aligned."""


def partial_scratch(rows: int, columns: int, sums: int) -> tuple[tuple[int, int], torch.dtype]:
    """(shape, dtype) of the partial rows that a kernel on M rows leaves for `sums` sums over them."""
    return (row_blocks(rows, columns), sums * columns + PADDING), torch.float32


def finish_sums(
    partial: torch.Tensor, columns: int, outs: tuple, dclip: torch.Tensor | None = None, coded: Coded | None = None
) -> Launch:
    """Add up partial rows [blocks, len(outs) * N + PADDING] into up to three results float32 [N] and dclip [1].

    Args:
        partial: what the blocks left.
        columns: N.
        outs: where each sum goes; None: nowhere.
        dclip: where the sum of the clip's parts goes, or None.
        coded: what was rounded under that clip; see Coded.clip_factor.
    """
    blocks, width = partial.shape
    results = (*outs, None, None, None)[:3]
    return launch(
        "sums.cu", "lsq_finish_sums", partial, *results, dclip, blocks, columns, len(outs), width,
        1.0 if coded is None else coded.clip_factor, grid=max(1, -(-len(outs) * columns // 32)), block=256,
    )


def add_parts(partial: torch.Tensor, out: torch.Tensor | None, factor: float = 1.0) -> Launch:
    """out [1] = factor times the sum of `partial` float32 [parts], which is taken in double precision."""
    return launch(
        "sums.cu", "lsq_finish_sums", partial, None, None, None, out, partial.numel(), 0, 0, 1, float(factor),
        grid=1, block=256,
    )


def float_operand(values: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """out [M, N] = values [M, N], codes or floats, times scale [M], [1] or None, in the dtype of `out`."""
    return launch(
        "operands.cu", "lsq_float_operand", values, scale, out, 1 if scale is None else scale.numel(), *values.shape,
        grid=patches(*values.shape), FLOAT=FLOATS[out.dtype], FROM=FLOATS.get(values.dtype, 2),
    )


def zero(out: torch.Tensor) -> Launch:
    """Fill `out`, of any shape and dtype of activations, with zeros."""
    return launch(
        "operands.cu", "lsq_zero", out, out.numel(), grid=max(1, -(-out.numel() // (256 * VECTOR))),
        FLOAT=FLOATS[out.dtype],
    )


def check_columns(multiple: int, **columns: int) -> None:
    """Refuse widths that are no multiple of `multiple`, naming them.

    Raises:
        ValueError: a width is not.
    """
    for name, width in columns.items():
        check(
            width % multiple == 0,
            f"{name} is {width}; on CUDA it must be a multiple of {multiple}: choose other sizes, or the CPU",
        )
