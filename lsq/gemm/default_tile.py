"""The rule for untuned products of a GPU: which of them lsq's tiles make, and by which tile.

It follows a model of GPUs (benchmarks/model_gpu_step.py, docs/gpu.md); nothing of it is measured.
"""

import math

from lsq.gemm.configuration import MOST_TILE_ROWS, TILE_STEP, WGMMA_SM, TileConfiguration
from lsq.gemm.product_key import OVER_TOKENS, TILED, TILED_ALONE, ProductKey

BLOCKS = 128
"""Blocks that fill a GPU, about its multiprocessors. Tiles shrink until there are so many."""
SIDES = {
    "mma": ((128, 128), (128, 64), (64, 64)),
    "wgmma": ((128, 256), (128, 128), (128, 64), (64, 64)),
}
"""Rows and columns of tiles, the fastest first."""
FEW = 64
"""Products of at most so many rows have tiles of so many rows."""
SHARED_BYTES = {"mma": 48 * 1024, "wgmma": 192 * 1024}
"""Of a block: two fit a multiprocessor of every GPU; one of Hopper's, and two with small tiles."""
STAGES = {"mma": 4, "wgmma": 8}
INNER_OF_A_PART = 1024
"""Values along K that a part has at least."""
MOST_PARTS = 8
LONGEST_BESIDE_FASTER_PRODUCTS = {"mma": 512, "wgmma": 8192}
"""Largest K of tiles on GPUs whose libraries multiply faster than mma.sync. There, sums that pass
through memory cost less than slower multiplication (by wgmma: than reads of tiles through the L2
cache), unless K is short."""


def default_tile(key: ProductKey, sm: int | None = None) -> TileConfiguration | None:
    """The tile for an untuned product; None: cuBLASLt multiplies, but not for TILED_ALONE.

    Args:
        key: of an operation, or of a MATMUL, which has no tile.
        sm: compute capability of the GPU, e.g. 90; None: of any whose fastest int8 products are
            those of mma.sync.
    """
    instruction = "wgmma" if sm == WGMMA_SM else "mma"
    if key.op not in TILED_ALONE and _is_left_to_cublaslt(key, sm, instruction):
        return None
    parts = MOST_PARTS if key.op == OVER_TOKENS else 1
    parts = max(1, min(parts, key.k // INNER_OF_A_PART))
    for rows, columns in SIDES[instruction]:
        rows = FEW if key.m <= FEW else rows
        tiles = -(-key.m // rows) * -(-key.n // columns)
        if tiles * parts >= BLOCKS:
            break
    stages = min(STAGES[instruction], SHARED_BYTES[instruction] // (TILE_STEP * (rows + columns)))
    split = min(parts, math.ceil(BLOCKS / tiles))
    return TileConfiguration(
        rows=rows, columns=columns, stages=stages, split=split, instruction=instruction
    )


def _is_left_to_cublaslt(key: ProductKey, sm: int | None, instruction: str) -> bool:
    """Whether no tile takes a product, or a library multiplies it faster."""
    if key.op not in TILED or key.n % 16 or key.k % 16 or key.m > 64 * MOST_TILE_ROWS:
        return True
    return sm is not None and 90 <= sm < 120 and key.k > LONGEST_BESIDE_FASTER_PRODUCTS[instruction]
