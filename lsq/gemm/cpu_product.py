"""The int8 product of the CPU as a configuration says, by oneDNN (torch._int_mm) or by tiles, and
its exact reference.

out [M, N] = a [M, K] times b [N, K] transposed. Scratch memory is one stretch of bytes, cut into
aligned tensors; their sizes follow from the key and the configuration alone, and none falls when a
dimension grows.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.product_key import LARGEST_INNER, ProductKey, inner_parts
from lsq.native import loader, tiles

ALIGNMENT = 64
"""Bytes of a cache line, at whose multiples the parts of scratch memory begin."""
UNIT = 32
"""Rows of a block are a multiple: packed bits of whole rows begin at a byte there."""


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a int8 [M, K], b int8 [N, K] -> int32 [M, N], through float64, in which every sum is exact.

    Where K is longer than LARGEST_INNER: float32 [M, N], see `product_key.inner_parts`.
    """
    sums = [
        (a[:, part].to(torch.float64) @ b[:, part].to(torch.float64).t()).to(torch.int32)
        for part in inner_parts(a.shape[1])
    ]
    return sums[0] if len(sums) == 1 else functools.reduce(torch.add, (one.float() for one in sums))


def int8_product(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a int8 [M, K], b int8 [N, K] -> int32 [M, N].

    Raises:
        ValueError: K could overflow the sums.
    """
    check_inner(a.shape[1])
    a, b = _unambiguous(a), _unambiguous(b)
    if out is None:
        return torch._int_mm(a, b.t())
    return torch._int_mm(a, b.t(), out=out)


def _unambiguous(x: torch.Tensor) -> torch.Tensor:
    """x [1, n] or [n, 1] with strides that say which; with strides (1, 1), torch._int_mm (2.13)
    reads past its end."""
    if x.stride() != (1, 1):
        return x
    rows, columns = x.shape
    return x.as_strided(x.shape, (columns, 1) if rows == 1 else (1, rows))


def configured_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    configuration: CpuConfiguration,
    scratch: Mapping[str, torch.Tensor],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, int32 sums of some rows) until all of a [M, K] times b [N, K] transposed
    were there.

    Args:
        a, b: int8; either may be a transposed view.
        configuration: how.
        scratch: what `carve` cuts for it, for this product or a larger one of the same layout. The
            sums lie in `scratch["sums"]`; each block, which are as equal as they can be in units of
            UNIT rows, overwrites the one before.

    Raises:
        ValueError: K could overflow the sums.
        KeyError: a part of `scratch` is missing.
    """
    total, inner = a.shape
    most = min(configuration.rows or total, total)
    size = -(-total // -(-total // most))
    size = min(-(-size // UNIT) * UNIT, most)
    if configuration.tiled:
        yield from _tiled_blocks(
            tile_product(a, b, configuration, scratch["packed"]), scratch["sums"], size
        )
        return
    if "b" in scratch:
        b = scratch["b"][:, :inner].copy_(b)
    for first in range(0, total, size):
        rows = a[first : first + size]
        copied = scratch["a"][: len(rows), :inner].copy_(rows) if "a" in scratch else rows
        yield first, int8_product(copied, b, out=scratch["sums"][: len(rows)])


def tile_product(
    a: torch.Tensor, b: torch.Tensor, configuration: CpuConfiguration, packed: torch.Tensor | None
) -> tiles.TileProduct:
    """The same product for loops that multiply and read their sums in one pass.

    It holds no memory alive.

    Args:
        packed: the part of that name, at the beginning of memory that may have more; None: loops
            have their own.

    Raises:
        ValueError: K could overflow the sums.
    """
    check_inner(a.shape[1])
    return tiles.TileProduct.of(a, b, configuration.kernel, configuration.rows, packed)


def _tiled_blocks(
    product: tiles.TileProduct, sums: torch.Tensor, size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    loader.call("lsq_pack_columns", product)
    for first in range(0, product.rows, size):
        block = sums[: min(size, product.rows - first)]
        loader.call("lsq_multiply_block", product, first, len(block), block)
        yield first, block


def check_inner(inner: int) -> None:
    """Refuse an inner dimension that could overflow the sums.

    Raises:
        ValueError: it could.
    """
    if inner > LARGEST_INNER:
        raise ValueError(
            f"an int8 product over {inner} values could overflow int32; the largest inner dimension"
            " of one is "
            f"{LARGEST_INNER}: multiply parts, as inner_parts says"
        )


class Part(NamedTuple):
    """One tensor of scratch memory."""

    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool = False
    """It lies as [columns, rows]."""

    @property
    def lies(self) -> tuple[int, int]:
        """Rows and their distance as they lie: of codes an odd number of cache lines, of everything
        else packed."""
        rows, columns = reversed(self.shape) if self.transposed else self.shape
        return rows, (
            -(-columns // ALIGNMENT) | 1
        ) * ALIGNMENT if self.dtype == torch.int8 else columns

    @property
    def bytes(self) -> int:
        """Its size, up to where the next part may begin."""
        return -(-math.prod(self.lies) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor at the beginning of `memory`, one-dimensional, int8 or uint8."""
        rows, distance = self.lies
        lying = (
            memory[: rows * distance * self.dtype.itemsize].view(self.dtype).view(rows, distance)
        )
        return lying.t()[: self.shape[0]] if self.transposed else lying[:, : self.shape[1]]


@functools.lru_cache(maxsize=4096)
def parts(key: ProductKey, configuration: CpuConfiguration) -> dict[str, Part]:
    """What running a product needs.

    Returns:
        "sums" int32 [block rows, N], and perhaps "a" int8 [block rows, K] and "b" int8 [N, K]:
        copies. Or "packed", one
        row of bytes: b as tiles, unless each thread packs its columns. Not to be changed: it is
            kept.
    """
    rows = min(key.m, configuration.rows or key.m)
    if configuration.tiled:
        return (
            {}
            if key.request.by_columns
            else {"packed": Part((1, tiles.packed_bytes(key.n, key.k)), torch.uint8)}
        )
    found = {}
    if configuration.a_layout != "as_is":
        found["a"] = Part(
            (rows, key.k), torch.int8, key.layout[0] == "t" and configuration.a_layout != "mk"
        )
    if configuration.b_layout != "as_is":
        along_n = {"nk": False, "kn": True}.get(configuration.b_layout, key.layout[1] == "n")
        found["b"] = Part((key.n, key.k), torch.int8, along_n)
    return {**found, "sums": Part((rows, key.n), torch.int32)}


@functools.lru_cache(maxsize=4096)
def scratch_bytes(key: ProductKey, configuration: CpuConfiguration) -> int:
    """Bytes of all parts."""
    return sum(part.bytes for part in parts(key, configuration).values())


def check_scratch(memory: torch.Tensor, key: ProductKey, configuration: CpuConfiguration) -> None:
    """Raise ValueError if `memory` is too small for all parts."""
    needed = scratch_bytes(key, configuration)
    if memory.numel() < needed:
        raise ValueError(
            f"{key} needs {needed} bytes of scratch memory as it is configured ({configuration}),"
            " and has "
            f"{memory.numel()}; choose the files of tuned products before memory is planned"
        )


def carve(
    memory: torch.Tensor, key: ProductKey, configuration: CpuConfiguration
) -> dict[str, torch.Tensor]:
    """The parts as views of `memory`, one-dimensional int8 or uint8 at a multiple of ALIGNMENT
    bytes.

    Raises:
        ValueError: the memory is too small.
    """
    check_scratch(memory, key, configuration)
    found, first = {}, 0
    for name, part in parts(key, configuration).items():
        found[name] = part.view(memory[first:])
        first += part.bytes
    return found


def fresh_scratch(key: ProductKey, configuration: CpuConfiguration) -> dict[str, torch.Tensor]:
    """What `configured_blocks` takes, in fresh memory: of tiles, too, whose sums loops would read
    as they are made."""
    found = carve(_aligned(scratch_bytes(key, configuration)), key, configuration)
    if not configuration.tiled:
        return found
    return {
        "packed": _aligned(tiles.packed_bytes(key.n, key.k)),
        "sums": torch.empty(key.m, key.n, dtype=torch.int32),
    }


def _aligned(count: int) -> torch.Tensor:
    """At least `count` bytes at a multiple of ALIGNMENT."""
    memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % ALIGNMENT :]
