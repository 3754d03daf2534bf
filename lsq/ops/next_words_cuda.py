"""Launches of lsq.ops.next_words."""

import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.native.geometry import VECTOR
from lsq.native.launch import check, launch
from lsq.ops.launches import tiled
from lsq.ops.next_words import NextWords
from lsq.ops.vocabulary_loss import PRODUCT
from lsq.program.cuda import launches, scratch_of


def _tile(op: NextWords) -> TileConfiguration | None:
    """Return the tiles of the logits; None: there are no rows."""
    check(op.weight is not None, "NextWords reads no packed weights on CUDA: give it `weight`")
    return gemm.cuda_tile(PRODUCT, *_shape(op))


@scratch_of.register(NextWords)
def scratch_of_next_words(op: NextWords):
    """Return memory for the largest logits of groups of eight words, each warp's (largest logit,
    sum of exponentials) of rows, the best groups of each row, and the logits of their words."""
    tile = _tile(op)
    across = 0 if tile is None else tile.blocks(*_shape(op)[:2])[0]
    groups = across * tile.columns // VECTOR if tile is not None and op.best else 0
    warps = across * tile.warps[1] if tile is not None else 0
    chosen = min(op.best, -(-op.vocabulary // VECTOR))
    return [
        ((op.rows, groups), torch.float32),
        ((op.rows, warps, 2), torch.float32),
        ((op.rows, chosen), torch.int32),
        ((op.rows, chosen * VECTOR), torch.float32),
    ]


def _shape(op: NextWords) -> tuple[int, int, int]:
    """(R, P, H)."""
    return op.rows, op.columns, op.x.codes.shape[1]


@launches.register(NextWords)
def launch_next_words(op: NextWords, groups, parts, chosen, logits):
    tile, inner = _tile(op), op.x.codes.shape[1]
    if tile is None:
        return []
    source, name = "next_words_product.cu", "lsq_next_words_product"
    product = tiled(source, name, tile, _shape(op), op, inner, groups, parts)
    sized = (value for one in (groups, parts, chosen) for value in (one, one.shape[1]))
    join = launch("next_words.cu", "lsq_next_words", op, inner, *sized, logits, grid=op.rows)
    return [product, join]
