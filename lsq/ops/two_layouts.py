"""The gradient of a product as int8 in two layouts, row by row and column by column, rounded at random.

An int8 product wants both operands contiguous along its inner dimension. A gradient [M, N] stands in two products,
whose inner dimensions are N (a scale for each row) and M (a scale for each column, or the rows' scales once more).
M rows, N columns, P: M padded to a multiple of 16 with zeros.
"""

from __future__ import annotations

import torch

from lsq.csrc.geometry import MANY_BLOCKS, padded, row_blocks, row_defines
from lsq.csrc.launch import check, float_define, launch
from lsq.ops.kernels import check_columns
from lsq.ops.transpose import RoundedColumns, column_scratch, transpose_codes
from lsq.program.declare import Activations, Codes, Floats, Host, In, Key, Out, extent, factor
from lsq.program.operation import Operation
from lsq.quant import GRADIENT, Format, arithmetic


class RoundTwoLayouts(Operation):
    """x * weight_scale in one layout or both. NaN and infinity make the scale of their row or column NaN.

    Raises:
        ValueError: no layout is wanted, or codes without their scale.
    """

    x: In[Activations]
    """[M, N]"""
    weight_scale: In[Floats]
    """[N], of the rows of the weight behind the product."""
    key: In[Key]
    subsequence: int = 0
    """Of the random numbers that round the rows."""
    column_subsequence: int = 0
    """Of those that round the columns."""
    codes: Out[Codes] | None
    """[M, N]"""
    row_scale: Out[Floats] | None
    """[M]"""
    transposed: Out[Codes] | None
    """[N, P]"""
    column_scale: Out[Floats] | None
    """[N]; None: the transposed codes are the very codes of the rows, under their scales."""
    format: Host[Format] = GRADIENT

    def __post_init__(self):
        check(
            self.codes is not None or self.transposed is not None,
            "neither codes nor transposed codes are wanted of RoundTwoLayouts; give it memory for one of them",
        )
        check(
            (self.row_scale is not None) == self._by_rows,
            "RoundTwoLayouts needs row_scale where codes have the rows' scales, and nowhere else",
        )

    rows = extent(0, "x")

    @factor
    def largest(self) -> float:
        """Q."""
        return float(self.format.largest)

    @property
    def _by_rows(self) -> bool:
        """Whether rows are rounded, for either layout."""
        return self.codes is not None or self.column_scale is None

    @property
    def _by_columns(self) -> bool:
        return self.transposed is not None and self.column_scale is not None

    def reference(self):
        codes = row_scale = columns = column_scale = None
        if self._by_rows:
            codes, row_scale = arithmetic.round_rows(
                self.x, self.weight_scale, self.key, self.subsequence, self.format.largest
            )
        if self._by_columns:
            scaled = self.x * self.weight_scale
            columns, column_scale = arithmetic.round_columns(
                scaled, self.key, self.column_subsequence, self.format.largest
            )
        if self.transposed is not None:
            turned = (columns if self._by_columns else codes).t()
            columns = torch.nn.functional.pad(turned, (0, padded(self.rows) - self.rows)).contiguous()
        return codes if self.codes is not None else None, row_scale, columns, column_scale

    def cpu(self) -> None:
        """The reference: gradients are rounded where they arise on the CPU, which has no use for two layouts."""
        self.store(self.reference())

    def cuda_scratch(self):
        if self.transposed is None:
            return []
        if not self._by_columns:
            return [] if self.codes is not None else [(self.x.shape, torch.int8)]
        largest, reciprocal = column_scratch(*self.x.shape)
        if self.codes is not None:
            largest = (row_blocks(*self.x.shape), self.x.shape[1]), torch.float32
        return [largest, reciprocal]

    def cuda(self, *scratch):
        check_columns(16, **{"the width of a matrix in two layouts": self.x.shape[1]})
        if self.transposed is None:
            return [self._round_rows(self.codes, None)]
        if not self._by_columns:
            codes = self.codes if self.codes is not None else scratch[0]
            return [self._round_rows(codes, None), transpose_codes(codes, self.transposed)]
        largest, reciprocal = scratch
        columns = RoundedColumns(
            values=self.x, column_factor=self.weight_scale, key=self.key, subsequence=self.column_subsequence,
            largest=self.largest, out=self.transposed, scale=self.column_scale,
        )  # fmt: skip
        by_rows = self.codes is not None
        first = self._round_rows(self.codes, largest) if by_rows else columns.magnitudes(largest)
        return [first, *columns.finish(largest, reciprocal)]

    def _round_rows(self, codes, partial):
        blocks = row_blocks(*self.x.shape, most=MANY_BLOCKS) if partial is None else partial.shape[0]
        return launch(
            "two_layouts.cu", "lsq_round_rows", self, codes, partial, grid=blocks, ROUNDED=1, **float_define(self.x),
            **row_defines(self.x.shape[1]),
        )
