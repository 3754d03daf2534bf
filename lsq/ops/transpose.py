"""Launches that write transposed int8 operands: codes [M, N] -> [N, P], P: M padded to a multiple
of 16 with zeros.

An int8 product wants both operands contiguous along its inner dimension, which is M in the gradient
of a weight.
"""

import torch

from lsq.native.geometry import padded, tiles
from lsq.native.launch import Launch, launch
from lsq.ops.kernels import check_columns


def transpose_codes(codes: torch.Tensor, out: torch.Tensor) -> Launch:
    """codes int8 [M, N] -> out int8 [N, P].

    Raises:
        ValueError: N or P is no multiple of 16.
    """
    rows, columns = codes.shape
    check_columns(
        16,
        **{
            "the width of codes to transpose": columns,
            "the width of transposed codes": out.shape[1],
        },
    )
    grid = tiles(out.shape[1], columns)
    return launch(
        "transpose.cu", "lsq_transpose_codes", codes, out, rows, columns, out.shape[1], grid=grid
    )


def transposed_scratch(rows: int, columns: int) -> tuple:
    """(shape, dtype) of transposed codes."""
    return (columns, padded(rows)), torch.int8
