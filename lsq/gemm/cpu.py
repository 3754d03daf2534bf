"""int8 products on the CPU: lsq's tiles multiply, and an operation's loops apply its epilogue in
the same pass.

A rule chooses the fastest instructions of the processor, and as many rows at a time as suit the
caches (lsq/csrc/cpu/tiles.h). The bits of the result do not depend on it.
"""

import functools

import torch

from lsq.gemm.operations import LARGEST_INNER, TILED_ALONE, inner_parts, is_long
from lsq.native import loader, tiles

ALIGNMENT = 64
"""Bytes of a cache line; the address of scratch memory is a multiple."""


def scratch_for(op: str, m: int, n: int, k: int) -> tuple[tuple[int], torch.dtype]:
    """Return (shape, dtype) of the scratch memory for a product, and for products with fewer
    tokens. m, n or k is 0 if there is nothing to multiply."""
    if not min(m, n, k):
        return (ALIGNMENT,), torch.uint8
    long = is_long(op, k)
    # for vocabularies, each thread packs the columns that it reads in its own memory
    packed = 0 if op in TILED_ALONE else _packed_bytes(n, LARGEST_INNER if long else k)
    return (max(packed, ALIGNMENT) + (2 * _sums_bytes(m, n) if long else 0),), torch.uint8


def multiply(
    op: str, operation: object, a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor, *arguments
) -> None:
    """Multiply int8 a [M, K] by b [N, K] transposed (both may be transposed views) and apply the
    epilogue of an operation.

    `lsq_multiply_<op>` of the C++ library gets the operation, a TileProduct and `arguments`. If K
    is too long for int32 sums, `lsq_end_long_<op>` gets float32 sums [M, N], their first row and
    their number of rows instead. `memory`: as `scratch_for` says, aligned to ALIGNMENT. Raises
    ValueError: `memory` is too small.
    """
    (m, k), n = a.shape, b.shape[0]
    if is_long(op, k):
        loader.call(f"lsq_end_long_{op}", operation, _long_sums(a, b, memory), 0, m, *arguments)
        return
    needed = 0 if op in TILED_ALONE else _packed_bytes(n, k)
    loader.call(f"lsq_multiply_{op}", operation, _tile_product(a, b, memory, needed), *arguments)


def untuned_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a int8 [M, K], b int8 [N, K] -> int32 [M, N] by tiles. Raises ValueError: K is so
    long that sums could overflow; LibraryError: the C++ library is missing."""
    size = _packed_bytes(b.shape[0], a.shape[1])
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu")
    memory = memory[-memory.data_ptr() % ALIGNMENT :]
    sums = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32, device="cpu")
    return _multiply_into(sums, a, b, memory)


def int8_product(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply a int8 [M, K], b int8 [N, K] -> int32 [M, N] by oneDNN. Raises ValueError: K is so
    long that sums could overflow."""
    _check_inner(a.shape[1])
    a, b = _unambiguous(a), _unambiguous(b)
    if out is None:
        return torch._int_mm(a, b.t())
    return torch._int_mm(a, b.t(), out=out)


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a int8 [M, K], b int8 [N, K] -> int32 [M, N] in float64, where every sum is exact.

    If K is longer than LARGEST_INNER, the result is float32 [M, N]; see `inner_parts`.
    """
    sums = [
        (a[:, part].to(torch.float64) @ b[:, part].to(torch.float64).t()).to(torch.int32)
        for part in inner_parts(a.shape[1])
    ]
    return sums[0] if len(sums) == 1 else functools.reduce(torch.add, (s.float() for s in sums))


def _packed_bytes(n: int, k: int) -> int:
    return -(-tiles.packed_bytes(n, k) // ALIGNMENT) * ALIGNMENT


def _sums_bytes(m: int, n: int) -> int:
    return -(-4 * m * n // ALIGNMENT) * ALIGNMENT


def _tile_product(
    a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor, needed: int
) -> tiles.TileProduct:
    _check_inner(a.shape[1])
    if memory.numel() < needed:
        raise ValueError(
            f"a product [{a.shape[0]}, {a.shape[1]}] x [{b.shape[0]}, {b.shape[1]}] needs {needed}"
            f" bytes of scratch memory, and has {memory.numel()}: use what scratch_for says"
        )
    return tiles.TileProduct.of(a, b, tiles.fastest(), memory if needed else None)


def _multiply_into(
    sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor
) -> torch.Tensor:
    product = _tile_product(a, b, memory, _packed_bytes(b.shape[0], a.shape[1]))
    loader.call("lsq_pack_columns", product)
    loader.call("lsq_multiply_block", product, 0, len(sums), sums)
    return sums


def _long_sums(a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return float32 [M, N] in `memory`: exact sums of the parts of K, added as floats."""
    (m, inner), n = a.shape, b.shape[0]
    size = _sums_bytes(m, n)
    total, block = (memory[first : first + 4 * m * n] for first in (0, size))
    total, block = total.view(torch.float32).view(m, n), block.view(torch.int32).view(m, n)
    for part in inner_parts(inner):
        sums = _multiply_into(block, a[:, part], b[:, part], memory[2 * size :])
        total.add_(sums) if part.start else total.copy_(sums)
    return total


def _check_inner(inner: int) -> None:
    if inner > LARGEST_INNER:
        raise ValueError(
            f"an int8 product over {inner} values could overflow int32; the largest inner dimension"
            f" is {LARGEST_INNER}: multiply parts, as inner_parts says"
        )


def _unambiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x [1, n] or [n, 1] with strides that tell them apart: with strides (1, 1),
    torch._int_mm (2.13) reads past its end."""
    if x.stride() != (1, 1):
        return x
    rows, columns = x.shape
    return x.as_strided(x.shape, (columns, 1) if rows == 1 else (1, rows))
