"""Launches of lsq.ops.vocabulary_loss."""

from collections.abc import Sequence

import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.native.geometry import MANY_BLOCKS, VECTOR, row_blocks, row_defines
from lsq.native.launch import Launch, Product, check, float_define, launch
from lsq.ops.embedding_cuda import scatter_launches, scatter_scratch
from lsq.ops.launches import converted, converted_scratch, float_operand, tiled
from lsq.ops.vocabulary_loss import (
    GRADIENT_PRODUCT,
    PRODUCT,
    KeptInputGradient,
    KeptWeightGradient,
    Prediction,
    VocabularyLoss,
    VocabularyLossGradient,
)
from lsq.program.cuda import launches, scratch_of
from lsq.program.operation import Operation, Spec

CUDA_BLOCK_ROWS = 256  # Rows of float logits in memory at a time: 34 MB for 32,768 words.


@scratch_of.register(VocabularyLoss)
def scratch_of_vocabulary_loss(op: VocabularyLoss):
    """Return memory for both losses of rows; for codes, also tiles' sums and targets' logits."""
    given = op.prediction
    row = (given.rows,), torch.float32
    if given.x.coded is None:
        return [row, row, *_blocks_scratch(given)]
    return [row, row, _tile_sums(_tile(given, PRODUCT), given), row]


@launches.register(VocabularyLoss)
def launch_vocabulary_loss(op: VocabularyLoss, losses, nlls, *scratch):
    given = op.prediction
    if given.x.coded is None:
        check(op.bound is None, "the gradient of float logits is not rounded: leave its bound out")
        entries = _blocks(given, scratch, "lsq_vocabulary_loss", op, losses, nlls)
    else:
        entries = _loss_of_tiles(op, *scratch, losses, nlls)
    return [*entries, launch("vocabulary_sums.cu", "lsq_sum_losses", op, losses, nlls, grid=2)]


@scratch_of.register(VocabularyLossGradient)
def scratch_of_vocabulary_loss_gradient(op: VocabularyLossGradient):
    return _blocks_scratch(op.prediction) if op.prediction.x.coded is None else []


@launches.register(VocabularyLossGradient)
def launch_vocabulary_loss_gradient(op: VocabularyLossGradient, *scratch):
    if op.prediction.x.coded is not None:
        return _gradient_of_tiles(op)
    return _blocks(
        op.prediction, scratch, "lsq_vocabulary_loss_gradient", op, **float_define(op.dlogits)
    )


SUMS = 8  # Numbers that a tile leaves for a row, in two halves.
TOGETHER = 32  # Rows for which a block joins the numbers of tiles.


def _tile_sums(tile: TileConfiguration | None, given: Prediction) -> Spec:
    across = 0 if tile is None else tile.blocks(given.rows, given.columns)[0]
    return (2, across, given.rows, SUMS // 2), torch.float32


def _loss_of_tiles(op: VocabularyLoss, parts, chosen, losses, nlls) -> list[Launch]:
    """Return the launches for both losses of each row, its normaliser and its bound."""
    tile, shape = _tile(op.prediction, PRODUCT), _shape(op.prediction)
    if tile is None:
        return []
    source, name = "vocabulary_loss_product.cu", "lsq_vocabulary_loss_product"
    product = tiled(source, name, tile, shape, op, shape[2], parts, chosen)
    arguments = op, parts, parts.shape[1], chosen, losses, nlls
    grid = -(-shape[0] // TOGETHER)
    return [product, launch("vocabulary_sums.cu", "lsq_vocabulary_losses", *arguments, grid=grid)]


def _gradient_of_tiles(op: VocabularyLossGradient) -> list[Launch]:
    tile, shape = _tile(op.prediction, GRADIENT_PRODUCT), _shape(op.prediction)
    if tile is None:
        return []
    source, name = "vocabulary_loss_gradient_product.cu", "lsq_vocabulary_loss_gradient_product"
    rounds = op.rounded is not None
    defines = {"ROUNDED": int(rounds)} | ({} if rounds else float_define(op.dlogits))
    return [tiled(source, name, tile, shape, op, shape[2], **defines)]


def _shape(given: Prediction) -> tuple[int, int, int]:
    """(M, P, K)."""
    return given.rows, given.columns, given.x.tensor.shape[1]


def _tile(given: Prediction, product: str) -> TileConfiguration | None:
    """Return the tiles of logits of codes; None: there are no rows."""
    return gemm.cuda_tile(product, given.rows, *given.weight.codes.shape)


def _blocks_scratch(given: Prediction) -> list[Spec]:
    """Return memory in float mode: a block of logits, and the weight if x has another dtype."""
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
    """Return, in float mode, the products of blocks of rows, each with a launch of `kernel` on it.

    `kernel` takes op, logits, their stride, the first row and `arguments`.
    """
    memory, *narrow = scratch
    entries, weight = converted(given.weight.matrix, None, given.x.tensor.dtype, iter(narrow))
    threads = 128
    while threads < 512 and threads * 2 * VECTOR < given.columns:
        threads *= 2
    blocks = max(1, -(-given.rows // CUDA_BLOCK_ROWS))
    # every block's first row of x is aligned
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


@launches.register(KeptInputGradient)
def launch_kept_input_gradient(op: KeptInputGradient):
    return launch(
        "kept_gradient.cu",
        "lsq_kept_input_gradient",
        op,
        grid=row_blocks(op.rows, op.columns, most=MANY_BLOCKS),
        **float_define(op.dx),
        **row_defines(op.columns),
    )


@scratch_of.register(KeptWeightGradient)
def scratch_of_kept_weight_gradient(op: KeptWeightGradient):
    return scatter_scratch(op.rows, op.columns)


@launches.register(KeptWeightGradient)
def launch_kept_weight_gradient(op: KeptWeightGradient, before, ordered, partial):
    copied = [] if op.others is op.dweight else [float_operand(op.others, None, op.dweight)]
    return [*copied, *scatter_launches(op, before, ordered, partial, tables=1, KEPT=1, FLOAT=0)]
