"""Which products of a GPU's operations are multiplied and ended in one kernel: as tuned, or by a
rule."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lsq.gemm import lookup
from lsq.gemm.configuration import TileConfiguration
from lsq.gemm.default_tile import default_tile
from lsq.gemm.product_key import TILED_ALONE, ProductKey, is_long
from lsq.gemm.requested import note

_forced = threading.local()


def cuda_tile(op: str, m: int, n: int, k: int) -> TileConfiguration | None:
    """How a kernel of lsq's own multiplies codes [M, K] x [N, K] and ends the product; None:
    cuBLASLt multiplies.

    Operations ask when they say what scratch they need, and again for their launches. The answer
    depends on the shape and the files of the GPU that is here alone; where there is none, on the
    shape.

    Args:
        op: one of product_key.TILED, or of TILED_ALONE, whose tiles are those of the rule.
        m, n, k: of a product whose launches are prepared; 0 where there is nothing to multiply.

    Raises:
        ValueError: there is no such product.
    """
    if not min(m, n, k) or is_long(op, k):
        return None
    key, alone = _key(op, m, n, k), op in TILED_ALONE
    if not alone:
        note(key)
    if hasattr(_forced, "tile") and (_forced.tile or not alone):
        return _forced.tile
    return _tile(lookup.generation(), key)


@contextmanager
def ended_by(tile: TileConfiguration | None) -> Iterator[None]:
    """Within this context and thread, what `cuda_tile` answers: for who compares, counts or
    compiles all ways.

    None leaves products to cuBLASLt, but those of TILED_ALONE.
    """
    before = vars(_forced).copy()
    _forced.tile = tile
    try:
        yield
    finally:
        vars(_forced).clear()
        vars(_forced).update(before)


def choices() -> tuple:
    """What decides how products are made, on all devices: another one whenever that may have
    changed."""
    return lookup.generation(), hasattr(_forced, "tile"), getattr(_forced, "tile", None)


@functools.lru_cache(maxsize=4096)
def _key(op: str, m: int, n: int, k: int) -> ProductKey:
    return ProductKey(op=op, m=m, n=n, k=k)


@functools.lru_cache(maxsize=4096)
def _tile(generation: int, key: ProductKey) -> TileConfiguration | None:
    """Once for each product and choice of files, so that the table counts it once."""
    try:
        table = lookup.table("cuda")
    except RuntimeError:  # no GPU: programs are planned, or run in the emulator
        return default_tile(key)
    if key.op in TILED_ALONE:
        return default_tile(key, table.here.sm)
    found = table.configuration(key)
    if not isinstance(found, TileConfiguration):
        return None  # cuBLASLt's products are counted where their algorithms are looked up
    table.use(key)
    return found
