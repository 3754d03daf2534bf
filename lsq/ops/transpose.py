"""Launches that write transposed int8 operands: codes [M, N] -> [N, P], P: M padded to a multiple of 16 with zeros.

An int8 product wants both operands contiguous along its inner dimension, which is M in the gradient of a weight.
"""

from dataclasses import dataclass

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
    """(shape, dtype) of what `RoundedColumns` needs: largest magnitudes of parts of the rows, reciprocals."""
    parts = max(1, min(PARTS, -(-rows // TILE)))
    return [((parts, columns), torch.float32), ((columns,), torch.float32)]


def transposed_scratch(rows: int, columns: int) -> tuple:
    """(shape, dtype) of transposed codes."""
    return (columns, padded(rows)), torch.int8


@dataclass(frozen=True, kw_only=True)
class RoundedColumns:
    """values [M, N], codes or floats, times row_factor [M] and column_factor [N], rounded per column at random.

    See lsq.quant.arithmetic.round_columns.

    Raises:
        ValueError: N is no multiple of 16.
    """

    values: torch.Tensor
    row_factor: torch.Tensor | None = None
    column_factor: torch.Tensor | None = None
    key: torch.Tensor
    subsequence: int
    largest: float
    """The largest code."""
    out: torch.Tensor
    """int8 [N, P]"""
    scale: torch.Tensor
    """float32 [N]"""

    def __post_init__(self):
        check_columns(16, **{"the width of values to transpose": self.values.shape[1]})

    def magnitudes(self, partial: torch.Tensor) -> Launch:
        """Each column's largest magnitude in parts of the rows -> `partial` (see `column_scratch`)."""
        rows, columns = self.values.shape
        return launch(
            "transpose.cu", "lsq_column_largest", self.values, self.row_factor, self.column_factor, partial, rows,
            columns, grid=(partial.shape[0], tiles(rows, columns)[1]), **_value_defines(self.values),
        )

    def finish(self, partial: torch.Tensor, reciprocal: torch.Tensor) -> list[Launch]:
        """From magnitudes [parts, N], whoever found them, to codes; reciprocal float32 [N]."""
        rows, columns = self.values.shape
        defines = _value_defines(self.values)
        return [
            launch(
                "transpose.cu", "lsq_column_scales", partial, self.scale, reciprocal, partial.shape[0], columns,
                self.largest, grid=max(1, -(-columns // 32)), **defines,
            ),
            launch(
                "transpose.cu", "lsq_round_transposed", self.values, self.row_factor, self.column_factor, reciprocal,
                self.key, self.out, self.subsequence, rows, columns, self.out.shape[1], self.largest,
                grid=tiles(self.out.shape[1], columns), **defines,
            ),
        ]


def _value_defines(values: torch.Tensor) -> dict[str, int]:
    return {"CODES": int(values.dtype == torch.int8), "FLOAT": FLOATS.get(values.dtype, 0)}
