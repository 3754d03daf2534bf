"""Launches of lsq.ops.weight_gradient."""

import math

import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.native.geometry import MANY_BLOCKS, TILE, padded, row_blocks, row_defines, tiles
from lsq.native.launch import TICKET, Launch, Product, launch
from lsq.ops.launches import (
    SUMS,
    check_columns,
    converted,
    converted_scratch,
    int8_products,
    sums_scratch,
    tiled,
    transposed_scratch,
    zero,
)
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import check_parts, finish
from lsq.ops.weight_gradient import GEMM, ProjectWeightGradient
from lsq.program.cuda import launches, leave_sums, scratch_of
from lsq.program.operation import Spec

PARTS = 16
"""Most runs of rows whose largest magnitudes per column are found apart."""


def _product_dtype(op: ProjectWeightGradient) -> torch.dtype:
    """dtype of the operands of a product of floats."""
    return op.x.floats.dtype if op.x.coded is None else torch.float32


def _tile(op: ProjectWeightGradient) -> TileConfiguration | None:
    """Tiles of the one kernel for product and epilogue; None: a library multiplies, and a
    kernel applies the epilogue."""
    if op.gradient is None or op.weight.in_out:
        return None
    rows, inner = op.gradient.codes.shape
    return gemm.cuda_tile(GEMM, inner, op.columns, padded(rows) if rows else 0)


def _clip_sums(op: ProjectWeightGradient) -> Spec:
    """(shape, dtype) of what a GPU leaves of the gradients of the clips."""
    if op.weight.in_out:
        return clip_sums_in_out(op)
    tile = _tile(op)
    if tile is None:
        return (op.weight_rows, 1), torch.float32
    return tile_clip_sums(tile, op.weight_rows, op.columns, op.clips)


def _leaves_no_sums(op: ProjectWeightGradient) -> bool:
    """Whether the kernel on rows makes the gradients of the clips, of which each row has
    one."""
    return op.clips > 1 and _tile(op) is None and not op.weight.in_out


@leave_sums.register(ProjectWeightGradient)
def leave_sums_of_project_weight_gradient(op: ProjectWeightGradient, tensor):
    if op.dclip is None or _leaves_no_sums(op):
        return []
    found = PartialSums.of_clips(
        tensor(op.dclip.name + ".parts", *_clip_sums(op)), op.clips, op.dclip
    )
    op.parts, op.dclip = found.parts, None
    return [found]


@scratch_of.register(ProjectWeightGradient)
def scratch_of_project_weight_gradient(op: ProjectWeightGradient):
    if op.float_mode:
        return []
    (rows, inner), columns, tile = op.upstream.shape, op.columns, _tile(op)
    sums = [] if op.parts is not None else [_clip_sums(op)]
    product = (columns, inner) if op.weight.in_out else (inner, columns)
    if op.gradient is not None:
        parts = max(1, min(PARTS, -(-rows // TILE)))
        made = (
            split_scratch(tile, op.weight_rows, columns)
            if tile
            else sums_scratch(*product, padded(rows))
        )
        return [
            *sums,
            transposed_scratch(rows, inner),
            transposed_scratch(rows, columns),
            ((parts, columns), torch.float32),
            ((columns,), torch.float32),
            *made,
        ]
    dtype = _product_dtype(op)
    operands = [*converted_scratch(op.x.tensor, dtype), *converted_scratch(op.floats, dtype)]
    return [*sums, (product, torch.float32), *operands]


@launches.register(ProjectWeightGradient)
def launch_project_weight_gradient(op: ProjectWeightGradient, *scratch):
    if op.float_mode:
        return [_floats(op, op.floats, op.x.floats, op.dweight)] if op.rows else [zero(op.dweight)]
    sums, *scratch = scratch if op.parts is None else (op.parts, *scratch)
    check_parts(sums, _clip_sums(op))
    if op.gradient is not None:
        entries = _int8_entries(op, sums, *scratch)
    else:
        entries = _float_entries(op, sums, iter(scratch))
    if _leaves_no_sums(op):
        return entries
    return [
        *entries,
        *finish(PartialSums.of_clips(sums, op.clips, op.dclip), leaves=op.parts is not None),
    ]


def _floats(op: ProjectWeightGradient, gradient, x, out) -> Product:
    """gradient [M, N] and x [M, K] -> out [N, K], or [K, N]."""
    a, b = (x, gradient) if op.weight.in_out else (gradient, x)
    return Product(a=a, b=b, out=out, transpose_a=True, transpose_b=True)


def _int8_entries(op: ProjectWeightGradient, sums, gradient, x, largest, scale, *made):
    """Both operands transposed, x rounded once more with a scale for each column, their product
    and its end."""
    inner, columns, tile = op.upstream.shape[1], op.columns, _tile(op)
    check_columns(
        16, **{"the width of a weight": columns, "the width of its gradient's operand": inner}
    )
    parts, width = len(largest), x.shape[1]
    (down, along), (_, strips) = tiles(width, inner), tiles(width, columns)
    operands = [
        launch(
            "transpose.cu",
            "lsq_begin_weight_gradient",
            op,
            gradient,
            largest,
            parts,
            inner,
            width,
            grid=parts * strips + down * along,
        ),
        launch(
            "transpose.cu",
            "lsq_round_transposed",
            op,
            largest,
            scale,
            x,
            parts,
            width,
            grid=(down, strips),
        ),
    ]
    if tile is not None:
        parts = made[0] if made else None
        return [*operands, weight_gradient_product(op, tile, (gradient, x, scale), sums, parts)]
    pair = (x, gradient) if op.weight.in_out else (gradient, x)
    return [*operands, *int8_products(*pair, *made, op=GEMM), _epilogue(op, made[-1], scale, sums)]


def _epilogue(op: ProjectWeightGradient, product, column_scale, sums):
    """The kernel on rows; the gradients of clips for rows are whole there."""
    if op.weight.in_out:
        return epilogue_in_out(op, product, column_scale, sums)
    per_channel = op.clips > 1 and op.dclip is not None
    return launch(
        "weight_gradient.cu",
        "lsq_project_weight_gradient",
        op,
        product if op.rows else None,
        column_scale,
        op.dclip if per_channel else sums,
        grid=row_blocks(op.weight_rows, op.columns, most=MANY_BLOCKS),
        SUMS=0 if op.gradient is None else SUMS[product.dtype],
        FLOAT=0,
        **row_defines(op.columns),
    )


def _float_entries(op: ProjectWeightGradient, sums, scratch):
    product, dtype = next(scratch), _product_dtype(op)
    values, x = converted(op.x.tensor, None if op.x.coded is None else op.x.scale, dtype, scratch)
    gradients, gradient = converted(op.floats, None, dtype, scratch)
    products = [*values, *gradients, _floats(op, gradient, x, product)] if op.rows else []
    return [*products, _epilogue(op, product, None, sums)]


def tile_clip_sums(tile: TileConfiguration, rows: int, columns: int, clips: int) -> Spec:
    """(shape, dtype) of the parts (lsq.ops.sums) that the kernel leaves of the gradients of a
    weight's clips.

    Of clips for rows, a row of each column of warps; of one clip, a number of each warp.
    """
    blocks = tile.blocks(rows, columns)
    shape = (
        (tile.warps[1] * blocks[0], rows) if clips > 1 else (math.prod((*tile.warps, *blocks)), 1)
    )
    return shape, torch.float32


def split_scratch(tile: TileConfiguration, rows: int, columns: int) -> list[Spec]:
    """Scratch memory for a weight [N, K] where blocks share a tile: the sums of each."""
    tiles = math.prod(tile.blocks(rows, columns))
    return [((tiles, tile.split, tile.rows * tile.columns), torch.int32)] if tile.split > 1 else []


def weight_gradient_product(
    op: ProjectWeightGradient,
    tile: TileConfiguration,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    clip_sums: torch.Tensor,
    parts: torch.Tensor | None,
) -> Launch:
    """The launch that makes the gradient of its operands, but for finishing the sums of clips.

    Args:
        op: of a gradient in codes.
        tile: and in how many parts P is split.
        operands: int8 [at least N, P], the gradient's codes transposed; int8 [K, P], those of x
            times the gradient's scales, rounded once more; float32 [K], the scales of that.
        clip_sums: as `tile_clip_sums` says.
        parts: as `split_scratch` says; None if there is one part.

    Raises:
        ValueError: the kernel does not take the shape.
    """
    gradient, x, column_scale = operands
    columns, inner = x.shape
    return tiled(
        "weight_gradient_product.cu",
        "lsq_weight_gradient_product",
        tile,
        (op.weight_rows, columns, inner),
        op,
        gradient,
        x,
        column_scale,
        inner,
        clip_sums,
        parts,
        TICKET,
        FLOAT=0,
    )


def clip_sums_in_out(op: ProjectWeightGradient) -> Spec:
    """(shape, dtype) of the parts (lsq.ops.sums) that the kernel leaves of the gradients of
    clips."""
    blocks = row_blocks(op.columns, op.weight_rows)
    return (blocks, op.weight_rows if op.clips > 1 else 1), torch.float32


def epilogue_in_out(
    op: ProjectWeightGradient,
    product: torch.Tensor,
    input_scale: torch.Tensor | None,
    clip_sums: torch.Tensor,
) -> Launch:
    """The epilogue of the product [K, P] of a gradient, int32 or float32; input_scale [K] of int32.

    Raises:
        ValueError: P is not N, or rows of it cannot be held.
    """
    outputs = op.weight_rows
    if product.shape[1] != outputs:
        raise ValueError(
            f"codes of a weight [inputs, outputs] have {product.shape[1]} rows; on CUDA they must"
            f" be its {outputs} "
            "outputs, and no more"
        )
    return launch(
        "weight_gradient_in_out.cu",
        "lsq_weight_gradient_in_out",
        op,
        product if op.rows else None,
        input_scale,
        clip_sums,
        grid=len(clip_sums),
        SUMS=0 if input_scale is None else SUMS[product.dtype],
        FLOAT=0,
        **row_defines(outputs),
    )
