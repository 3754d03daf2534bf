"""The int8 products of the CPU's operations, each run as it is tuned.

An operation declares scratch memory with `scratch_for` and multiplies with `row_blocks`, or with `multiply_into` where
the sums are its result. Every call is counted and timed.
"""

import functools
import time
from collections.abc import Iterator

import torch

from lsq.gemm import lookup
from lsq.gemm.cpu_product import configured_blocks, multiply
from lsq.gemm.product_key import OPERATIONS, ProductKey
from lsq.gemm.scratch import ALIGNMENT, carve

_key = functools.lru_cache(maxsize=4096)(ProductKey.of)


def scratch_for(op: str, m: int, n: int, k: int) -> tuple[tuple[int], torch.dtype]:
    """(shape, dtype) of the scratch memory for a product [M, K] x [N, K], and for any with fewer tokens.

    Raises:
        ValueError: there is no such product.
    """
    size = lookup.largest_scratch(op, m, n, k, OPERATIONS[op].layout) if min(m, n, k) else 0
    return (max(size, ALIGNMENT),), torch.uint8


def row_blocks(op: str, a: torch.Tensor, b: torch.Tensor, memory: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, int32 sums of some rows) until all of a [M, K] times b [N, K] transposed were there.

    Args:
        op: one of product_key.OPERATIONS, whose layout the operands have.
        memory: what `scratch_for` asks for; each block of sums overwrites the one before.

    Raises:
        ValueError: K could overflow the sums, or the memory is too small.
    """
    size = a.shape[0], b.shape[0], a.shape[1]
    layout = OPERATIONS[op].layout
    configuration = lookup.configuration_for(op, *size, layout)
    parts = carve(memory, _key(op, *size), configuration)
    blocks = configured_blocks(a, b, configuration, parts)
    seconds, began = 0.0, time.perf_counter()
    for block in blocks:
        seconds += time.perf_counter() - began
        yield block
        began = time.perf_counter()
    lookup.add_seconds(op, *size, layout, seconds)


def multiply_into(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> None:
    """out int32 [M, N] = a [M, K] times b [N, K] transposed; arguments and errors as of `row_blocks`."""
    size = a.shape[0], b.shape[0], a.shape[1]
    layout = OPERATIONS[op].layout
    configuration = lookup.configuration_for(op, *size, layout)
    began = time.perf_counter()
    multiply(a, b, out, configuration, carve(memory, _key(op, *size), configuration))
    lookup.add_seconds(op, *size, layout, time.perf_counter() - began)
