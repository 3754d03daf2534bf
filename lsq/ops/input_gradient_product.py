"""The gradient of an input, its product and its end in one kernel: another way to a
ProjectInputGradient on CUDA.

M rows, K columns, P values to multiply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lsq.gemm import TileConfiguration
from lsq.native.launch import Launch, check, float_define
from lsq.ops.sums import PADDING
from lsq.ops.tiled_product import tiled
from lsq.program.operation import Spec

if TYPE_CHECKING:
    from lsq.ops.input_gradient import ProjectInputGradient


def end_defines(operation: ProjectInputGradient) -> dict[str, int]:
    """-D for csrc/cuda/input_gradient_end.cuh, of what few ends have."""
    end = operation.nonlinearity
    slope = {} if end is None or end.before is None else {"ACTIVATION": int(end.activation)}
    return slope | ({} if operation.joined is None else {"JOINED": 1})


def clip_parts(tile: TileConfiguration, columns: int) -> int:
    """Numbers for the clip in each row of parts: one of each warp across."""
    return tile.warps[1] * tile.blocks(0, columns)[0]


def tile_parts(tile: TileConfiguration, rows: int, columns: int) -> Spec:
    """(shape, dtype) of the parts that the kernel leaves (lsq.ops.sums): a row of each row of
    warps."""
    width = columns + -(-clip_parts(tile, columns) // PADDING) * PADDING
    return (tile.warps[0] * tile.blocks(rows, columns)[1], width), torch.float32


def input_gradient_product(
    operation: ProjectInputGradient,
    tile: TileConfiguration,
    weight: torch.Tensor,
    partial: torch.Tensor,
) -> Launch:
    """The one launch that does what the operation does, but for finishing its sums.

    Args:
        operation: of a gradient in codes.
        tile: not in parts.
        weight: int8 [K, P], its codes transposed.
        partial: as `tile_parts` says.

    Raises:
        ValueError: it ends in codes, whose scales want whole rows; or the kernel does not take the
            shape.
    """
    check(
        operation.rounded is None,
        "a product that ends by tiles has floats: to round a row takes all of its tiles",
    )
    before = operation.nonlinearity and operation.nonlinearity.before
    given = [
        one for one in (before, operation.joined, operation.added, operation.dx) if one is not None
    ]
    columns, inner = weight.shape
    return tiled(
        "input_gradient_product.cu",
        "lsq_input_gradient_product",
        tile,
        (operation.rows, columns, inner),
        operation,
        weight,
        inner,
        partial,
        partial.shape[1],
        **float_define(*given),
        **end_defines(operation),
    )
