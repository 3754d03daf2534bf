"""Runs int8 products on the CPU as they are configured: copies first, so many rows at a time.

A copy of codes has its rows an odd number of cache lines apart. Where they are a power of two apart, all of a column
lies in one set of the cache, and packing a matrix for the product costs up to twice the product itself.
"""

from collections.abc import Iterator, Mapping

import torch

from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.product import check_inner, int8_product

_NOTHING: Mapping[str, torch.Tensor] = {}


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    configuration: CpuConfiguration,
    scratch: Mapping[str, torch.Tensor] = _NOTHING,
) -> None:
    """out int32 [M, N] = a int8 [M, K] times b int8 [N, K] transposed.

    Args:
        a, b: either may be a transposed view.
        out: contiguous.
        configuration: how.
        scratch: what lsq.gemm.scratch.carve cuts for it, for this product or a larger one of the same layout.

    Raises:
        ValueError: K could overflow the sums.
        KeyError: a part of `scratch` is missing.
    """
    if not (scratch or configuration.rows):
        int8_product(a, b, out=out)
        return
    for first, left, right in _blocks(a, b, configuration, scratch):
        _product(left, right, out[first : first + left.shape[0]], configuration, scratch)


def configured_blocks(
    a: torch.Tensor, b: torch.Tensor, configuration: CpuConfiguration, scratch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, int32 sums of some rows) until all of a [M, K] times b [N, K] transposed were there.

    The sums lie in `scratch["sums"]`; each block overwrites the one before. Arguments and errors as of `multiply`.
    """
    for first, left, right in _blocks(a, b, configuration, scratch):
        sums = scratch["sums"][: left.shape[0]]
        _product(left, right, sums, configuration, scratch)
        yield first, sums


def _blocks(
    a: torch.Tensor, b: torch.Tensor, configuration: CpuConfiguration, scratch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first row, rows of a, b) for each block, the blocks as equal as they can be; b is copied where it should be."""
    check_inner(a.shape[1])
    if "b" in scratch:
        b = scratch["b"][:, : b.shape[1]].copy_(b)
    total = a.shape[0]
    blocks = -(-total // min(configuration.rows or total, total))
    size = -(-total // blocks)
    for first in range(0, total, size):
        yield first, a[first : first + size], b


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    configuration: CpuConfiguration,
    scratch: Mapping[str, torch.Tensor],
) -> None:
    """The product of one block."""
    rows, inner = a.shape
    if "a" in scratch:
        a = scratch["a"][:rows, :inner].copy_(a)
    if configuration.path == "float32":
        out.copy_(torch.mm(a, b.t(), out=scratch["product"][:rows]))
    else:
        int8_product(a, b, out=out)
