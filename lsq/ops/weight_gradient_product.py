"""The gradient of a weight, its product and its end in one kernel: another way to a
ProjectWeightGradient on CUDA.

N rows and K columns of the weight, P values to multiply, which blocks of the same tile may share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lsq.gemm import TileConfiguration
from lsq.native.launch import TICKET, Launch
from lsq.ops.sums import PartialSums
from lsq.ops.tiled_product import tiled
from lsq.program.operation import Spec

if TYPE_CHECKING:
    from lsq.ops.weight_gradient import ProjectWeightGradient


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


def sums_of_clips(clip_sums: torch.Tensor, clips: int, dclip: torch.Tensor | None) -> PartialSums:
    """What finishes them, from parts as `tile_clip_sums` has them."""
    if clips > 1:
        return PartialSums.of(clip_sums, clips, (dclip,))
    return PartialSums.of(clip_sums, 0, (), dclip)


def split_scratch(tile: TileConfiguration, rows: int, columns: int) -> list[Spec]:
    """What the kernel needs for a weight [N, K] where blocks share a tile: the sums of each."""
    tiles = math.prod(tile.blocks(rows, columns))
    return [((tiles, tile.split, tile.rows * tile.columns), torch.int32)] if tile.split > 1 else []


def weight_gradient_product(
    operation: ProjectWeightGradient,
    tile: TileConfiguration,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    clip_sums: torch.Tensor,
    parts: torch.Tensor | None,
) -> Launch:
    """The launch that makes the gradient of its operands, but for finishing the sums of clips.

    Args:
        operation: of a gradient in codes.
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
        (operation.weight_rows, columns, inner),
        operation,
        gradient,
        x,
        column_scale,
        inner,
        clip_sums,
        parts,
        TICKET,
        FLOAT=0,
    )
