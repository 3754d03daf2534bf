"""quantize_transpose: one float matrix as int8 in two layouts, row by row and column by column, rounded at random.

An int8 product wants both operands contiguous along its inner dimension. A gradient [M, N] stands in two products,
whose inner dimensions are N (a scale for each row) and M (a scale for each column, or the rows' scales once more).
M rows, N columns, P: M padded to a multiple of 16 with zeros.
"""

import torch

from lsq.csrc.geometry import MANY_BLOCKS, padded, row_blocks, row_defines
from lsq.csrc.launch import check, float_define, launch
from lsq.ops import rounding
from lsq.ops.kernels import check_columns
from lsq.ops.registry import OpDefinition, register
from lsq.ops.transpose import column_scratch, round_columns_transposed, round_transposed, transpose_codes


def reference(x, factor, key, *, stream=0, column_stream=0, rows=True, transposed=True, shared_scale=False):
    """x float [M, N], factor float32 [N] or None for 1, key int64 [1] -> two layouts of x * factor.

    Args:
        stream: of the random numbers that round the rows.
        column_stream: of those that round the columns.
        rows: whether the layout by rows is wanted.
        transposed: whether the other one is.
        shared_scale: the transposed layout holds the very codes of the layout by rows, with the rows' scales.

    Returns:
        codes int8 [M, N], row_scale float32 [M], transposed codes int8 [N, P], column_scale float32 [N]; None for what
        is not wanted or has no meaning. NaN and infinity make the scale of their row or column NaN.

    Raises:
        ValueError: no layout is wanted.
    """
    _check_wanted(rows, transposed)
    shared_scale = shared_scale and transposed
    scaled = x if factor is None else x * factor
    codes = row_scale = columns = column_scale = None
    if rows or shared_scale:
        codes, row_scale = rounding.round_rows(scaled, torch.ones((), dtype=scaled.dtype), key, stream)
    if shared_scale:
        columns = codes
    elif transposed:
        columns, column_scale = rounding.round_columns(scaled, key, column_stream)
    if transposed:
        columns = torch.nn.functional.pad(columns.t(), (0, padded(x.shape[0]) - x.shape[0])).contiguous()
    return codes if rows else None, row_scale, columns, column_scale


def cpu(
    x, factor, key, codes, row_scale, columns, column_scale, *, stream=0, column_stream=0, rows=True, transposed=True,
    shared_scale=False,
):
    """The reference: gradients are rounded where they arise on the CPU, which has no use for two layouts."""
    values = reference(
        x, factor, key, stream=stream, column_stream=column_stream, rows=rows, transposed=transposed,
        shared_scale=shared_scale,
    )
    for output, value in zip((codes, row_scale, columns, column_scale), values, strict=True):
        if output is not None:
            output.copy_(value)


def cuda_scratch(x, factor, key, *, rows=True, transposed=True, shared_scale=False, stream=0, column_stream=0):
    count, width = x.shape
    if not transposed:
        return []
    if shared_scale:
        return [] if rows else [((count, width), torch.int8)]
    largest, reciprocal = column_scratch(count, width)
    return [((row_blocks(count, width), width), torch.float32) if rows else largest, reciprocal]


def cuda(
    x, factor, key, codes, row_scale, columns, column_scale, *scratch, stream=0, column_stream=0, rows=True,
    transposed=True, shared_scale=False,
):
    _check_wanted(rows, transposed)
    check_columns(16, **{"the width of a matrix in two layouts": x.shape[1]})
    if not transposed:
        return [_round_rows(x, factor, key, stream, codes, row_scale, None)]
    if shared_scale:
        codes = codes if rows else scratch[0]
        return [_round_rows(x, factor, key, stream, codes, row_scale, None), transpose_codes(codes, columns)]
    arguments = x, None, factor, key, column_stream, columns, column_scale, *scratch
    if not rows:
        return round_columns_transposed(*arguments)
    return [_round_rows(x, factor, key, stream, codes, row_scale, scratch[0]), *round_transposed(*arguments)]


def _round_rows(x, factor, key, stream, codes, row_scale, partial):
    count, width = x.shape
    blocks = row_blocks(count, width, most=MANY_BLOCKS) if partial is None else partial.shape[0]
    return launch(
        "quantize_transpose.cu", "lsq_round_rows", x, factor, key, codes, row_scale, partial, stream, count,
        grid=blocks, ROUNDED=1, **float_define(x), **row_defines(width),
    )


def _check_wanted(rows, transposed):
    check(rows or transposed, "neither rows nor transposed is wanted of quantize_transpose; set one to True")


register(OpDefinition(name="quantize_transpose", reference=reference, cpu=cpu, cuda=cuda, cuda_scratch=cuda_scratch))
