"""Launches of lsq.ops.weight_gradient."""

import math

import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.native.geometry import MANY_BLOCKS, TILE, padded, row_blocks, row_defines, tiles
from lsq.native.launch import TICKET, Launch, Product, check, launch
from lsq.ops.launches import (
    SUMS,
    check_columns,
    converted,
    converted_scratch,
    int8_products,
    reads_transposed,
    sums_scratch,
    tiled,
    zero,
)
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import KernelSums
from lsq.ops.weight_gradient import GEMM, ProjectWeightGradient
from lsq.program.cuda import kernel_sums, launches, scratch_of

PARTS = 16  # Most runs of rows that find their largest magnitudes separately.


def _product_dtype(op: ProjectWeightGradient) -> torch.dtype:
    return op.x.floats.dtype if op.x.coded is None else torch.float32


def _tile(op: ProjectWeightGradient) -> TileConfiguration | None:
    """Return the tiles of one kernel for product and epilogue; None: a library multiplies."""
    if op.gradient is None or op.weight.in_out:
        return None
    rows, inner = op.gradient.codes.shape
    return gemm.cuda_tile(GEMM, inner, op.columns, padded(rows) if rows else 0)


def _sums(op: ProjectWeightGradient) -> KernelSums | None:
    """Return the parts of clip gradients; None: the kernel on rows writes the gradients itself.

    Tiles leave a row for each column of warps if rows have clips, else a number for each warp.
    """
    tile, each_row, rows = _tile(op), op.clips > 1, op.weight_rows
    if op.weight.in_out:
        shape = row_blocks(op.columns, rows), rows if each_row else 1
    elif tile is None and each_row and op.dclip is not None:
        return None
    elif tile is None:
        shape = rows, 1
    else:
        blocks = tile.blocks(rows, op.columns)
        warps = math.prod((*tile.warps, *blocks))
        shape = (tile.warps[1] * blocks[0], rows) if each_row else (warps, 1)

    def of(parts) -> PartialSums:
        return PartialSums.of_clips(parts, op.clips, op.dclip)

    return KernelSums(op, (shape, torch.float32), of, ("dclip",))


@kernel_sums.register(ProjectWeightGradient)
def sums_of_project_weight_gradient(op: ProjectWeightGradient) -> list[KernelSums]:
    sums = None if op.float_mode or op.dclip is None else _sums(op)
    return [] if sums is None else [sums]


@scratch_of.register(ProjectWeightGradient)
def scratch_of_project_weight_gradient(op: ProjectWeightGradient):
    if op.float_mode:
        return []
    (rows, inner), columns, tile, sums = op.upstream.shape, op.columns, _tile(op), _sums(op)
    clips = [] if sums is None else sums.scratch
    product = (columns, inner) if op.weight.in_out else (inner, columns)
    if op.gradient is not None:
        parts = max(1, min(PARTS, -(-rows // TILE)))
        transposed = (inner, columns) if reads_transposed(tile) else (columns,)
        operands = [((width, padded(rows)), torch.int8) for width in transposed]
        scales = [((parts, columns), torch.float32), ((columns,), torch.float32)]
        made = [] if tile else sums_scratch(*product, padded(rows))
        if tile is not None and tile.split > 1:  # for sums of the blocks that share a tile
            tiles_of = math.prod(tile.blocks(op.weight_rows, op.columns))
            made = [((tiles_of, tile.split, tile.rows * tile.columns), torch.int32)]
        return [*clips, *operands, *scales, *made]
    dtype = _product_dtype(op)
    operands = [*converted_scratch(op.x.tensor, dtype), *converted_scratch(op.floats, dtype)]
    return [*clips, (product, torch.float32), *operands]


@launches.register(ProjectWeightGradient)
def launch_project_weight_gradient(op: ProjectWeightGradient, *scratch):
    if op.float_mode:
        return [_floats(op, op.floats, op.x.floats, op.dweight)] if op.rows else [zero(op.dweight)]
    left, sums = iter(scratch), _sums(op)
    clips = None if sums is None else sums.take(left)
    entries_of = _float_entries if op.gradient is None else _int8_entries
    return [*entries_of(op, clips, left), *([] if sums is None else sums.finish(clips))]


def _floats(op: ProjectWeightGradient, gradient, x, out) -> Product:
    """Return the product of gradient [M, N] and x [M, K], out [N, K] or [K, N]."""
    a, b = (x, gradient) if op.weight.in_out else (gradient, x)
    return Product(a=a, b=b, out=out, transpose_a=True, transpose_b=True)


def _int8_entries(op: ProjectWeightGradient, clips, scratch):
    """Return launches: transpose operands, round x again, multiply, apply the epilogue."""
    inner, columns, tile = op.upstream.shape[1], op.columns, _tile(op)
    gradient = next(scratch) if reads_transposed(tile) else None
    x, largest, scale, *made = scratch
    check_columns(
        16, **{"the width of a weight": columns, "the width of its gradient's operand": inner}
    )
    parts, width = len(largest), x.shape[1]
    (down, along), (_, strips) = tiles(width, inner), tiles(width, columns)
    begin = op, gradient, largest, parts, inner, width
    rounded = op, largest, scale, x, parts, width
    blocks = parts * strips + (0 if gradient is None else down * along)
    operands = [
        launch("transpose.cu", "lsq_begin_weight_gradient", *begin, grid=blocks),
        launch("transpose.cu", "lsq_round_transposed", *rounded, grid=(down, strips)),
    ]
    if tile is not None:
        shared = made[0] if made else None
        return [*operands, _product(op, tile, (gradient, x, scale), clips, shared)]
    pair = (x, gradient) if op.weight.in_out else (gradient, x)
    return [*operands, *int8_products(*pair, *made, op=GEMM), _epilogue(op, made[-1], scale, clips)]


def _float_entries(op: ProjectWeightGradient, clips, scratch):
    product, dtype = next(scratch), _product_dtype(op)
    values, x = converted(op.x.tensor, None if op.x.coded is None else op.x.scale, dtype, scratch)
    gradients, gradient = converted(op.floats, None, dtype, scratch)
    products = [*values, *gradients, _floats(op, gradient, x, product)] if op.rows else []
    return [*products, _epilogue(op, product, None, clips)]


def _epilogue(op: ProjectWeightGradient, product, column_scale, clips) -> Launch:
    """Return the epilogue's launch: of int32 with the scales [K] of its columns, or of float32."""
    outputs, in_out = op.weight_rows, op.weight.in_out
    check(
        not in_out or product.shape[1] == outputs,
        f"codes of a weight [inputs, outputs] have {product.shape[1]} rows; on CUDA they must"
        f" be its {outputs} outputs, and no more",
    )
    kernel = "weight_gradient_in_out" if in_out else "project_weight_gradient"
    blocks = row_blocks(outputs, op.columns, most=MANY_BLOCKS)
    return launch(
        f"{kernel.removeprefix('project_')}.cu",
        f"lsq_{kernel}",
        op,
        product if op.rows else None,
        column_scale,
        op.dclip if clips is None else clips,
        grid=len(clips) if in_out else blocks,
        SUMS=0 if op.gradient is None else SUMS[product.dtype],
        FLOAT=0,
        **row_defines(outputs if in_out else op.columns),
    )


def _product(op: ProjectWeightGradient, tile: TileConfiguration, operands, clips, parts) -> Launch:
    """Return the launch that makes the gradient, except for finishing the sums of clips.

    `operands`: codes of the gradient, transposed if it `reads_transposed`, else None; codes of x
    times the gradient's scales, int8 [K, P]; their scales float32 [K].
    """
    columns, inner = operands[1].shape
    source, name = "weight_gradient_product.cu", "lsq_weight_gradient_product"
    arguments = op, *operands, op.upstream.shape[1], inner, clips, parts, TICKET
    return tiled(source, name, tile, (op.weight_rows, columns, inner), *arguments, FLOAT=0)
