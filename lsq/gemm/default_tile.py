"""Which products a GPU's kernels end where nothing is tuned: a rule by shape, as a model of GPUs has it.

Nothing of it is measured. benchmarks/model_gpu_step.py models both ways; docs/cuda.md has what it says.
"""

import math

from lsq.gemm.configuration import MOST_TILE_ROWS, TILE_STEP, TileConfiguration
from lsq.gemm.product_key import TILED, ProductKey

BLOCKS = 128
"""That fill a GPU: about its multiprocessors. Tiles become smaller until there are so many."""
SIDES = ((128, 128), (128, 64), (64, 64))
"""Rows and columns of tiles, the fastest first."""
SHARED_BYTES = 48 * 1024
"""Of a block: two of them fit a multiprocessor of every GPU."""
STAGES = 4
"""More are not worth their memory."""
INNER_OF_A_PART = 1024
"""Least values along K of a part."""
MOST_PARTS = 8
LONGEST_BESIDE_FASTER_PRODUCTS = 512
"""Largest K where GPUs whose libraries multiply faster than mma.sync can; there the sums' way through memory costs less
than slower multiplication, unless K is short."""


def default_tile(key: ProductKey, sm: int | None = None) -> TileConfiguration | None:
    """The tile for a product where nothing is tuned; None: cuBLASLt multiplies.

    Args:
        key: of an operation, or a product by itself, which has none.
        sm: compute capability of the GPU, e.g. 90; None: of any whose fastest int8 products are those of mma.sync.
    """
    if key.op not in TILED or key.n % 16 or key.k % 16 or key.m > 64 * MOST_TILE_ROWS:
        return None
    has_faster = sm is not None and 90 <= sm < 120
    if has_faster and key.k > LONGEST_BESIDE_FASTER_PRODUCTS:
        return None
    parts = MOST_PARTS if key.request.tokens == "k" else 1
    parts = max(1, min(parts, key.k // INNER_OF_A_PART))
    for rows, columns in SIDES:
        tiles = -(-key.m // rows) * -(-key.n // columns)
        if tiles * parts >= BLOCKS:
            break
    stages = min(STAGES, SHARED_BYTES // (TILE_STEP * (rows + columns)))
    return TileConfiguration(rows=rows, columns=columns, stages=stages, split=min(parts, math.ceil(BLOCKS / tiles)))
