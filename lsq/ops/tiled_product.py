"""Launches of kernels that multiply codes and end the product themselves
(csrc/cuda/product.cuh), on CUDA.

A product is [M, K] times [N, K] transposed, int8, N and K multiples of 16.
"""

import math

from lsq.gemm import TileConfiguration
from lsq.gemm.configuration import MOST_TILE_ROWS
from lsq.native.launch import TICKETS, Launch, check, launch
from lsq.ops.kernels import check_columns

WARP = 32
"""Threads."""


def tiled(
    source: str,
    name: str,
    tile: TileConfiguration,
    shape: tuple[int, int, int],
    *arguments,
    **defines: int,
) -> Launch:
    """The launch of a kernel that makes a product of that shape, (M, N, K), by such tiles; one row
    of them if M is 0.

    Raises:
        ValueError: N or K is no multiple of 16, or the product has more rows, or more tiles in
            parts, than there is room for.
    """
    m, n, k = shape
    check_columns(16, **{"the inner width of an int8 product": k, "its outer width": n})
    grid = tile.blocks(m, n)
    check(
        grid[1] <= MOST_TILE_ROWS,
        f"{m} rows are more than {MOST_TILE_ROWS * tile.rows}: take smaller batches",
    )
    check(
        tile.split == 1 or math.prod(grid) <= TICKETS,
        f"{tile}: a product of {m} x {n} has more than {TICKETS} of them, which are not made in"
        " parts: tune again",
    )
    by = {"WGMMA": 1} if tile.instruction == "wgmma" else {}
    return launch(
        source,
        name,
        *arguments,
        grid=(*grid, tile.split),
        block=WARP * math.prod(tile.warps),
        shared=tile.shared_bytes,
        TILE_M=tile.rows,
        TILE_N=tile.columns,
        STAGES=tile.stages,
        **by,
        **defines,
    )
