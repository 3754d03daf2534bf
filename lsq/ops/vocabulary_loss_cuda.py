"""Launches of lsq.ops.vocabulary_loss."""

from collections.abc import Sequence

import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.native.geometry import VECTOR
from lsq.native.launch import Launch, Product, check, float_define, launch
from lsq.ops.launches import converted, converted_scratch, tiled
from lsq.ops.prediction import Prediction
from lsq.ops.vocabulary_loss import (
    GRADIENT_PRODUCT,
    PRODUCT,
    VocabularyLoss,
    VocabularyLossGradient,
)
from lsq.program.cuda import launches, scratch_of
from lsq.program.operation import Operation, Spec

CUDA_BLOCK_ROWS = 256
"""Rows of float logits that exist at a time on CUDA: of 32,768 words 34 MB, which the L2 cache of
an A100 holds."""


@scratch_of.register(VocabularyLoss)
def scratch_of_vocabulary_loss(op: VocabularyLoss):
    """Both losses of each row; of codes, what tiles leave of the rows and the logits of the
    targets; of floats, what `_blocks_scratch` says.
    """
    given = op.prediction
    row = (given.rows,), torch.float32
    if given.x.coded is None:
        return [row, row, *_blocks_scratch(given)]
    return [row, row, tile_sums(tile_of(op.prediction, PRODUCT), given), row]


@launches.register(VocabularyLoss)
def launch_vocabulary_loss(op: VocabularyLoss, losses, nlls, *scratch):
    given = op.prediction
    if given.x.coded is None:
        check(op.bound is None, "the gradient of float logits is not rounded: leave its bound out")
        entries = _blocks(given, scratch, "lsq_vocabulary_loss", op, losses, nlls)
    else:
        entries = loss_of_tiles(op, tile_of(op.prediction, PRODUCT), *scratch, losses, nlls)
    return [*entries, launch("vocabulary_sums.cu", "lsq_sum_losses", op, losses, nlls, grid=2)]


@scratch_of.register(VocabularyLossGradient)
def scratch_of_vocabulary_loss_gradient(op: VocabularyLossGradient):
    return _blocks_scratch(op.prediction) if op.prediction.x.coded is None else []


@launches.register(VocabularyLossGradient)
def launch_vocabulary_loss_gradient(op: VocabularyLossGradient, *scratch):
    if op.prediction.x.coded is not None:
        return gradient_of_tiles(op, tile_of(op.prediction, GRADIENT_PRODUCT))
    return _blocks(
        op.prediction, scratch, "lsq_vocabulary_loss_gradient", op, **float_define(op.dlogits)
    )


SUMS = 8
"""Numbers that a tile leaves of a row, in two halves."""
TOGETHER = 32
"""Rows that a block joins."""


def tile_sums(tile: TileConfiguration | None, given: Prediction) -> Spec:
    """(shape, dtype) of what tiles leave of the rows; nothing if there are none."""
    across = 0 if tile is None else tile.blocks(given.rows, given.columns)[0]
    return (2, across, given.rows, SUMS // 2), torch.float32


def loss_of_tiles(
    op: VocabularyLoss,
    tile: TileConfiguration | None,
    parts: torch.Tensor,
    chosen: torch.Tensor,
    losses: torch.Tensor,
    nlls: torch.Tensor,
) -> list[Launch]:
    """The launches that make both losses of each row, its normaliser and its bound.

    Args:
        op: of codes.
        tile: None if there are no rows.
        parts: as `tile_sums` says.
        chosen: float32 [M], for the logits of the targets.
        losses, nlls: float32 [M], written.

    Raises:
        ValueError: K or P is no multiple of 16, or there are more rows than a grid has blocks for.
    """
    if tile is None:
        return []
    shape = _shape(op.prediction)
    product = tiled(
        "vocabulary_loss_product.cu",
        "lsq_vocabulary_loss_product",
        tile,
        shape,
        op,
        shape[2],
        parts,
        chosen,
    )
    join = launch(
        "vocabulary_sums.cu",
        "lsq_vocabulary_losses",
        op,
        parts,
        parts.shape[1],
        chosen,
        losses,
        nlls,
        grid=-(-shape[0] // TOGETHER),
    )
    return [product, join]


def gradient_of_tiles(op: VocabularyLossGradient, tile: TileConfiguration | None) -> list[Launch]:
    """The launch that makes the gradient of the logits, as floats or rounded.

    Args:
        op: of codes.
        tile: None if there are no rows.

    Raises:
        ValueError: as `loss_of_tiles`.
    """
    if tile is None:
        return []
    shape, rounded = _shape(op.prediction), op.rounded is not None
    return [
        tiled(
            "vocabulary_loss_gradient_product.cu",
            "lsq_vocabulary_loss_gradient_product",
            tile,
            shape,
            op,
            shape[2],
            ROUNDED=int(rounded),
            **({} if rounded else float_define(op.dlogits)),
        )
    ]


def _shape(given: Prediction) -> tuple[int, int, int]:
    """(M, P, K)."""
    return given.rows, given.columns, given.x.tensor.shape[1]


def tile_of(given: Prediction, product: str) -> TileConfiguration | None:
    """Tiles of logits of codes; None: there are no rows."""
    return gemm.cuda_tile(product, given.rows, *given.weight.codes.shape)


def _blocks_scratch(given: Prediction) -> list[Spec]:
    """Of floats: memory for a block of logits, and for the weight in the dtype of floats, where
    it has another."""
    columns = -(-given.columns // VECTOR) * VECTOR  # rows begin at multiples of 16 bytes
    block = (min(given.rows, CUDA_BLOCK_ROWS), columns), torch.float32
    return [block, *converted_scratch(given.weight.matrix, given.x.tensor.dtype)]


def _blocks(
    given: Prediction,
    scratch: Sequence[torch.Tensor],
    kernel: str,
    op: Operation,
    *arguments,
    **defines: int,
) -> list[Launch | Product]:
    """Of floats: for each block of rows the product that makes its logits, and a launch of
    `kernel` to read them.

    Args:
        scratch: as `_blocks_scratch` says.
        kernel: of vocabulary_loss.cu; takes op, logits, their stride, the first row and
            `arguments`.
    """
    memory, *narrow = scratch
    entries, weight = converted(given.weight.matrix, None, given.x.tensor.dtype, iter(narrow))
    threads = 128
    while threads < 512 and threads * 2 * VECTOR < given.columns:
        threads *= 2
    blocks = max(1, -(-given.rows // CUDA_BLOCK_ROWS))
    # aligned from every block's first row on
    rows = -(-given.rows // blocks // VECTOR) * VECTOR or 1
    for first in range(0, given.rows, rows):
        block = given.x.tensor[first : first + rows]
        entries += [
            Product(a=block, b=weight, out=memory[: len(block), : given.columns]),
            launch(
                "vocabulary_loss.cu",
                kernel,
                op,
                memory,
                memory.shape[1],
                first,
                *arguments,
                grid=len(block),
                block=threads,
                ROW_THREADS=threads,
                **defines,
            ),
        ]
    return entries
