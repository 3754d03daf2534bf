"""Launches that write transposed int8 operands: codes [M, N] -> [N, P], P: M padded to a multiple of 16 with zeros.

An int8 product wants both operands contiguous along its inner dimension, which is M in the gradient of a weight.
"""

import torch

from lsq.csrc.geometry import TILE, padded, tiles
from lsq.csrc.launch import Launch, launch
from lsq.ops.kernels import check_columns

PARTS = 64
"""Most runs of rows whose largest magnitudes per column are found apart."""


def transpose_codes(codes: torch.Tensor, out: torch.Tensor) -> Launch:
    """codes int8 [M, N] -> out int8 [N, P].

    Raises:
        ValueError: N is no multiple of 16.
    """
    rows, columns = codes.shape
    check_columns(16, **{"the width of codes to transpose": columns})
    grid = tiles(out.shape[1], columns)
    return launch("transpose.cu", "lsq_transpose_codes", codes, out, rows, columns, out.shape[1], grid=grid)


def transposed_scratch(rows: int, columns: int) -> tuple:
    """(shape, dtype) of transposed codes."""
    return (columns, padded(rows)), torch.int8


def column_scratch(rows: int, columns: int) -> list:
    """(shape, dtype) of what `round_transposed` needs: largest magnitudes of parts of the rows, scales, reciprocals."""
    parts = max(1, min(PARTS, -(-rows // TILE)))
    return [((parts, columns), torch.float32), ((columns,), torch.float32), ((columns,), torch.float32)]


def round_transposed(
    codes: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, scratch: tuple, *, key: torch.Tensor,
    subsequence: int, largest: float,
) -> list[Launch]:
    """codes int8 [M, N] times factor [M], rounded per column at random to codes up to `largest`: out int8 [N, P].

    See lsq.quant.arithmetic.round_columns. `scratch` is that of `column_scratch`, in which scales [N] are left.

    Raises:
        ValueError: N is no multiple of 16.
    """
    (rows, columns), (partial, scale, reciprocal) = codes.shape, scratch
    check_columns(16, **{"the width of values to transpose": columns})
    parts = partial.shape[0]
    return [
        launch(
            "transpose.cu", "lsq_column_largest", codes, factor, partial, rows, columns,
            grid=(parts, tiles(rows, columns)[1]),
        ),
        launch(
            "transpose.cu", "lsq_column_scales", partial, scale, reciprocal, parts, columns, largest,
            grid=max(1, -(-columns // 32)),
        ),
        launch(
            "transpose.cu", "lsq_round_transposed", codes, factor, reciprocal, key, out, subsequence, rows, columns,
            out.shape[1], largest, grid=tiles(out.shape[1], columns),
        ),
    ]  # fmt: skip
