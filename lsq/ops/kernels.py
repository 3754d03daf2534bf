"""Launches that the CUDA implementations of several operations need.

M rows, N columns.
"""

import torch

from lsq.native.geometry import VECTOR, patches
from lsq.native.launch import FLOATS, Launch, check, launch


def float_operand(values: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """out [M, N] = values [M, N], codes or floats, times scale [M], [1] or None, in the dtype of
    `out`."""
    return launch(
        "operands.cu",
        "lsq_float_operand",
        values,
        scale,
        out,
        1 if scale is None else scale.numel(),
        *values.shape,
        grid=patches(*values.shape),
        FLOAT=FLOATS[out.dtype],
        FROM=FLOATS.get(values.dtype, 2),
    )


def zero(out: torch.Tensor) -> Launch:
    """Fill `out`, of any shape and dtype of activations, with zeros."""
    return launch(
        "operands.cu",
        "lsq_zero",
        out,
        out.numel(),
        grid=max(1, -(-out.numel() // (256 * VECTOR))),
        FLOAT=FLOATS[out.dtype],
    )


def add_sums(sums: torch.Tensor, total: torch.Tensor, *, adds: bool) -> Launch:
    """total float32 [M, N] = sums int32 [M, N], or total + sums if it `adds`; M * N is a multiple
    of 8."""
    return launch(
        "operands.cu",
        "lsq_add_sums",
        sums,
        total,
        total.numel(),
        grid=max(1, -(-total.numel() // (256 * VECTOR))),
        ADDS=int(adds),
    )


def check_columns(multiple: int, **columns: int) -> None:
    """Refuse widths that are no multiple of `multiple`, naming them.

    Raises:
        ValueError: a width is not.
    """
    for name, width in columns.items():
        check(
            width % multiple == 0,
            f"{name} is {width}; on CUDA it must be a multiple of {multiple}: choose other sizes,"
            " or the CPU",
        )
