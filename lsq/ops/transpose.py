"""Launches that write transposed int8 operands: codes [M, N] -> [N, P], P: M padded to a multiple of 16 with zeros.

An int8 product wants both operands contiguous along its inner dimension, which is M in the gradient of a weight.
"""

import torch

from lsq.csrc.geometry import TILE, padded, tiles
from lsq.csrc.launch import FLOATS, Launch, launch
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
    return launch(
        "transpose.cu", "lsq_transpose_codes", codes, out, rows, columns, out.shape[1],
        grid=tiles(out.shape[1], columns), **_value_defines(codes),
    )


def column_scratch(rows: int, columns: int) -> list:
    """(shape, dtype) of what `round_columns_transposed` needs: largest magnitudes of parts of the rows, reciprocals."""
    parts = max(1, min(PARTS, -(-rows // TILE)))
    return [((parts, columns), torch.float32), ((columns,), torch.float32)]


def transposed_scratch(rows: int, columns: int) -> tuple:
    """(shape, dtype) of transposed codes."""
    return (columns, padded(rows)), torch.int8


def round_columns_transposed(values, row_factor, column_factor, key, stream, out, scale, partial, reciprocal) -> list:
    """values [M, N], codes or floats, times row_factor [M] and column_factor [N], rounded per column at random.

    See rounding.round_columns. out int8 [N, P], scale float32 [N]; partial and reciprocal: see `column_scratch`.

    Raises:
        ValueError: N is no multiple of 16.
    """
    rows, columns = values.shape
    largest = launch(
        "transpose.cu", "lsq_column_largest", values, row_factor, column_factor, partial, rows, columns,
        grid=(partial.shape[0], tiles(rows, columns)[1]), **_value_defines(values),
    )
    return [
        largest,
        *round_transposed(values, row_factor, column_factor, key, stream, out, scale, partial, reciprocal),
    ]


def round_transposed(values, row_factor, column_factor, key, stream, out, scale, partial, reciprocal) -> list:
    """The same where `partial` [parts, N] is there already."""
    rows, columns = values.shape
    check_columns(16, **{"the width of values to transpose": columns})
    defines = _value_defines(values)
    return [
        launch(
            "transpose.cu", "lsq_column_scales", partial, scale, reciprocal, partial.shape[0], columns,
            grid=max(1, -(-columns // 32)), **defines,
        ),
        launch(
            "transpose.cu", "lsq_round_transposed", values, row_factor, column_factor, reciprocal, key, out, stream,
            rows, columns, out.shape[1], grid=tiles(out.shape[1], columns), **defines,
        ),
    ]


def _value_defines(values: torch.Tensor) -> dict[str, int]:
    return {"CODES": int(values.dtype == torch.int8), "FLOAT": FLOATS.get(values.dtype, 0)}
