"""Launches, products and scratch memory that several operations need on CUDA.

M rows, N columns, K: the inner dimension of a product.
"""

import math
from collections.abc import Iterator

import torch

from lsq import gemm
from lsq.gemm.configuration import MOST_TILE_ROWS, TileConfiguration
from lsq.native.geometry import VECTOR, multiprocessors, patches, strided, tiles
from lsq.native.launch import FLOATS, TICKETS, Launch, Product, check, launch
from lsq.program.cuda import Spec
from lsq.program.values import Coded


def float_operand(values: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """Write out [M, N] = values [M, N], codes or floats, times scale [M], [1] or None."""
    return launch(
        "operands.cu",
        "lsq_float_operand",
        values,
        scale,
        out,
        1 if scale is None else scale.numel(),
        *values.shape,
        grid=patches(*values.shape),
        FLOAT=FLOATS[out.dtype],
        FROM=FLOATS.get(values.dtype, 2),
    )


def zero(out: torch.Tensor) -> Launch:
    """Fill `out`, of any shape and dtype of activations, with zeros."""
    arguments, dtype = (out, out.numel()), FLOATS[out.dtype]
    return launch("operands.cu", "lsq_zero", *arguments, grid=_blocks(out), FLOAT=dtype)


def _blocks(out: torch.Tensor) -> int:
    return max(1, -(-out.numel() // (256 * VECTOR)))


def add_sums(sums: torch.Tensor, total: torch.Tensor, *, adds: bool) -> Launch:
    """Write total float32 [M, N] = sums int32 [M, N], or total + sums; M * N is a multiple of 8."""
    arguments = sums, total, total.numel()
    return launch("operands.cu", "lsq_add_sums", *arguments, grid=_blocks(total), ADDS=int(adds))


def check_columns(multiple: int, **columns: int) -> None:
    """Raise ValueError for a width that is no multiple of `multiple`; keywords name widths."""
    for name, width in columns.items():
        check(
            width % multiple == 0,
            f"{name} is {width}; on CUDA it must be a multiple of {multiple}: choose other sizes,"
            " or the CPU",
        )


def started(rounded: Coded | None) -> dict[str, int]:
    """Return -DSTARTED of a kernel that rounds: 1 if the scale is written before it."""
    return {"STARTED": int(rounded is not None and rounded.started)}


SUMS = {torch.int32: 1, torch.float32: 2}
"""dtype of the sums of codes -> -DSUMS of the epilogue's kernel; 0: floats."""


def sums_scratch(rows: int, columns: int, inner: int) -> list[Spec]:
    """Return the scratch memory of `int8_products`; the last tensor holds the sums."""
    shape = rows, columns
    return [(shape, torch.int32), *([(shape, torch.float32)] if inner > gemm.LARGEST_INNER else [])]


def int8_products(
    a: torch.Tensor,
    b: torch.Tensor,
    sums: torch.Tensor,
    total: torch.Tensor | None = None,
    *,
    op: str = Product.op,
) -> list[Product | Launch]:
    """Return the products for sums int32 [M, N] = a int8 [M, K] times b int8 [N, K] transposed.

    `total`: float32 [M, N], if K is longer than one int32 sum may be. `op`: see Product.
    """
    check_columns(
        16, **{"the inner width of an int8 product": a.shape[1], "its outer width": b.shape[0]}
    )
    if not sums.numel():
        return []
    if total is None:
        return [Product(a=a, b=b, out=sums, op=op)]
    entries = []
    for part in gemm.inner_parts(a.shape[1]):
        entries.append(Product(a=a[:, part], b=b[:, part], out=sums))
        entries.append(add_sums(sums, total, adds=part.start > 0))
    return entries


def converted_scratch(values: torch.Tensor, dtype: torch.dtype) -> list[Spec]:
    """Return the scratch memory of `converted`."""
    return [] if values.dtype == dtype else [(tuple(values.shape), dtype)]


def converted(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    scratch: Iterator[torch.Tensor],
) -> tuple[list[Launch], torch.Tensor]:
    """Return (launches, values [M, N] in `dtype`), of codes with scale [M] or [1], or of floats."""
    if values.dtype == dtype:
        return [], values
    check_columns(8, **{"the width of an operand to convert": values.shape[1]})
    out = next(scratch)
    return [float_operand(values, scale, out)], out


def transpose_codes(codes: torch.Tensor, out: torch.Tensor) -> Launch:
    """Transpose codes int8 [M, N] to out int8 [N, P]."""
    (rows, columns), width = codes.shape, out.shape[1]
    given, made = "the width of codes to transpose", "the width of transposed codes"
    check_columns(16, **{given: columns, made: width})
    sizes, grid = (rows, columns, width), tiles(width, columns)
    return launch("transpose.cu", "lsq_transpose_codes", codes, out, *sizes, grid=grid)


WARP = 32  # Threads of a warp.


def reads_transposed(tile: TileConfiguration | None) -> bool:
    """Return whether a product reads operands whose rows are the inner dimension, so that others
    are transposed before; with mma.sync tiles transpose them in registers."""
    return tile is None or tile.instruction != "mma"


def tiled(
    source: str,
    name: str,
    tile: TileConfiguration,
    shape: tuple[int, int, int],
    *arguments,
    **defines: int,
) -> Launch:
    """Return the launch of a kernel that computes a product of `shape` (M, N, K) by tiles."""
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
    by = {}
    if tile.instruction == "wgmma":  # blocks stay and make one tile after another
        by = {"WGMMA": 1}
        grid = strided(math.prod(grid), max(1, multiprocessors() // tile.split)), 1
    return launch(
        source,
        name,
        *arguments,
        grid=(*grid, tile.split),
        block=WARP * tile.block_warps,
        shared=tile.shared_bytes,
        TILE_M=tile.rows,
        TILE_N=tile.columns,
        STAGES=tile.stages,
        **by,
        **defines,
    )
