"""The vocabulary's loss and its gradient from tiles of logits that stay in registers: codes on
CUDA.

One launch multiplies all rows with all words and ends each tile in what the loss needs of it; the
backward pass makes the tiles again and writes their gradient. M rows, P padded words, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lsq.gemm import TileConfiguration
from lsq.native.launch import Launch, float_define, launch
from lsq.ops.prediction import Prediction
from lsq.ops.tiled_product import tiled
from lsq.program.operation import Spec

if TYPE_CHECKING:
    from lsq.ops.vocabulary_loss import VocabularyLoss, VocabularyLossGradient

SUMS = 8
"""Numbers that a tile leaves of a row, in two halves."""
TOGETHER = 32
"""Rows that a block joins."""


def tile_sums(tile: TileConfiguration | None, given: Prediction) -> Spec:
    """(shape, dtype) of what tiles leave of the rows; nothing if there are none."""
    across = 0 if tile is None else tile.blocks(given.rows, given.columns)[0]
    return (2, across, given.rows, SUMS // 2), torch.float32


def loss_of_tiles(
    operation: VocabularyLoss,
    tile: TileConfiguration | None,
    parts: torch.Tensor,
    chosen: torch.Tensor,
    losses: torch.Tensor,
    nlls: torch.Tensor,
) -> list[Launch]:
    """The launches that make both losses of each row, its normaliser and its bound.

    Args:
        operation: of codes.
        tile: None if there are no rows.
        parts: as `tile_sums` says.
        chosen: float32 [M], for the logits of the targets.
        losses, nlls: float32 [M], written.

    Raises:
        ValueError: K or P is no multiple of 16, or there are more rows than a grid has blocks for.
    """
    if tile is None:
        return []
    shape = _shape(operation.prediction)
    product = tiled(
        "vocabulary_loss_product.cu",
        "lsq_vocabulary_loss_product",
        tile,
        shape,
        operation,
        shape[2],
        parts,
        chosen,
    )
    join = launch(
        "vocabulary_sums.cu",
        "lsq_vocabulary_losses",
        operation,
        parts,
        parts.shape[1],
        chosen,
        losses,
        nlls,
        grid=-(-shape[0] // TOGETHER),
    )
    return [product, join]


def gradient_of_tiles(
    operation: VocabularyLossGradient, tile: TileConfiguration | None
) -> list[Launch]:
    """The launch that makes the gradient of the logits, as floats or rounded.

    Args:
        operation: of codes.
        tile: None if there are no rows.

    Raises:
        ValueError: as `loss_of_tiles`.
    """
    if tile is None:
        return []
    shape, rounded = _shape(operation.prediction), operation.rounded is not None
    return [
        tiled(
            "vocabulary_loss_gradient_product.cu",
            "lsq_vocabulary_loss_gradient_product",
            tile,
            shape,
            operation,
            shape[2],
            ROUNDED=int(rounded),
            **({} if rounded else float_define(operation.dlogits)),
        )
    ]


def _shape(given: Prediction) -> tuple[int, int, int]:
    """(M, P, K)."""
    return given.rows, given.columns, given.x.tensor.shape[1]
