"""The int8 products of the CPU's operations, each run as it is tuned.

An operation declares scratch memory with `scratch_for` and multiplies with `multiply`, whose sums
its loops read. Every call is counted and timed; by tiles with what the loops do, since those read
sums in the pass that makes them. What is asked for is noted, so that what is to be tuned follows
from the operations themselves.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import torch

from lsq.gemm import lookup
from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.cpu_product import (
    ALIGNMENT,
    carve,
    check_scratch,
    configured_blocks,
    fresh_scratch,
    tile_product,
)
from lsq.gemm.product_key import LARGEST_INNER, ProductKey, inner_parts, is_long
from lsq.gemm.requested import note
from lsq.native import loader


@functools.lru_cache(maxsize=4096)
def _key(op: str, m: int, n: int, k: int) -> ProductKey:
    return ProductKey(op=op, m=m, n=n, k=k)


def scratch_for(op: str, m: int, n: int, k: int) -> tuple[tuple[int], torch.dtype]:
    """(shape, dtype) of the scratch memory for a product [M, K] x [N, K], and for any with fewer
    tokens.

    Args:
        op: one of product_key.REQUESTS.
        m, n, k: 0 where there is nothing to multiply.

    Raises:
        ValueError: there is no such product.
    """
    if not min(m, n, k):
        return (ALIGNMENT,), torch.uint8
    long = is_long(op, k)
    key = _key(op, m, n, LARGEST_INNER if long else k)
    note(key)
    sums = 2 * _sums_bytes(m, n) if long else 0
    return (sums + max(lookup.table().largest_scratch(key), ALIGNMENT),), torch.uint8


def untuned_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a int8 [M, K], b int8 [N, K] -> int32 [M, N], as it runs where nothing is tuned; all rows at
    once.

    Raises:
        ValueError: K could overflow the sums.
    """
    key = _key("project", a.shape[0], b.shape[0], a.shape[1])
    configuration = dataclasses.replace(CpuConfiguration.default(key), rows=0)
    ((_, sums),) = configured_blocks(a, b, configuration, fresh_scratch(key, configuration))
    return sums


def tiled(op: str, m: int, n: int, k: int) -> bool:
    """Whether `multiply` makes this product by tiles, and does not read b where an operation packs
    it for itself.

    Raises:
        ValueError: there is no such product.
    """
    return not is_long(op, k) and lookup.table().configuration(_key(op, m, n, k)).tiled


def multiply(
    op: str, operation: object, a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor, *arguments
) -> None:
    """Multiply a [M, K] by b [N, K] transposed, and let the loops of an operation end the product.

    These are functions of the C++ library: `lsq_multiply_<op>`, which takes a TileProduct, and
    `lsq_end_<op>`, which takes a block of sums int32, its first row, and the number of its rows;
    both take the operation before these. `lsq_end_long_<op>` takes float32 sums, where K is longer
    than one int32 sum may be.

    Args:
        op: one of product_key.REQUESTS, whose layout the operands have.
        operation: what the functions take first.
        a, b: int8; either may be a transposed view. Of weight gradients, b is written if the
            product is not `tiled`.
        memory: what `scratch_for` asks for.
        arguments: what they take last.

    Raises:
        ValueError: there is no such product, or the memory is too small.
    """
    if is_long(op, a.shape[1]):
        sums = _long_sums(op, a, b, memory)
        loader.call(f"lsq_end_long_{op}", operation, sums, 0, len(sums), *arguments)
        return
    key, table = _key(op, a.shape[0], b.shape[0], a.shape[1]), lookup.table()
    use = table.use(key)
    if not use.configuration.tiled:
        blocks = configured_blocks(a, b, use.configuration, carve(memory, key, use.configuration))
        for first, sums in _timed(blocks, lambda seconds: table.add_seconds(use, seconds)):
            loader.call(f"lsq_end_{op}", operation, sums, first, len(sums), *arguments)
        return
    began = time.perf_counter()
    check_scratch(memory, key, use.configuration)
    product = tile_product(a, b, use.configuration, memory)
    loader.call(f"lsq_multiply_{op}", operation, product, *arguments)
    table.add_seconds(use, time.perf_counter() - began)


def _sums_bytes(m: int, n: int) -> int:
    """Of 4-byte sums [M, N], up to where the next tensor may begin."""
    return -(-4 * m * n // ALIGNMENT) * ALIGNMENT


def _long_sums(op: str, a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] in `memory`: the sums of the parts of K; each is exact, and added as a
    float."""
    (m, inner), n, table = a.shape, b.shape[0], lookup.table()
    size = _sums_bytes(m, n)
    total, block = (memory[first : first + 4 * m * n] for first in (0, size))
    total, block = total.view(torch.float32).view(m, n), block.view(torch.int32).view(m, n)
    for part in inner_parts(inner):
        key = _key(op, m, n, part.stop - part.start)
        use = table.use(key)
        scratch = {"sums": block} | carve(memory[2 * size :], key, use.configuration)
        blocks = configured_blocks(a[:, part], b[:, part], use.configuration, scratch)
        for first, sums in _timed(blocks, lambda seconds, use=use: table.add_seconds(use, seconds)):
            rows = total[first : first + len(sums)]
            rows.add_(sums) if part.start else rows.copy_(sums)
    return total


def _timed(items: Iterator, note_seconds: Callable[[float], None]) -> Iterator:
    """The same items; in the end it says how long they took to make."""
    seconds, began = 0.0, time.perf_counter()
    for item in items:
        seconds += time.perf_counter() - began
        yield item
        began = time.perf_counter()
    note_seconds(seconds)
