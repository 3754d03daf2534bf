"""Which products of a GPU's operations one kernel makes together with the epilogue: as tuned, or by
a rule."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lsq.gemm import lookup
from lsq.gemm.configuration import TileConfiguration
from lsq.gemm.default_tile import default_tile
from lsq.gemm.product_key import TILED_ALONE, ProductKey, is_long, note, operation_key

_forced = threading.local()


def cuda_tile(op: str, m: int, n: int, k: int) -> TileConfiguration | None:
    """The tile of a kernel of lsq that multiplies codes [M, K] x [N, K] and applies the epilogue;
    None: cuBLASLt multiplies.

    Operations ask for their scratch memory, and again for their launches. The answer depends on the
    shape and the files of the GPU that is here; without a GPU, on the shape.

    Args:
        op: one of product_key.TILED, or of TILED_ALONE, whose tiles are those of the rule.
        m, n, k: of a product whose launches are prepared; 0 where there is nothing to multiply.

    Raises:
        ValueError: there is no such product.
    """
    if not min(m, n, k) or is_long(op, k):
        return None
    key, alone = operation_key(op, m, n, k), op in TILED_ALONE
    if not alone:
        note(key)
    if hasattr(_forced, "tile") and (_forced.tile or not alone):
        return _forced.tile
    return _tile(lookup.generation(), key)


@contextmanager
def ended_by(tile: TileConfiguration | None) -> Iterator[None]:
    """Within this context and thread, the answer of `cuda_tile`, to compare, count or compile all
    ways. None leaves products to cuBLASLt, but those of TILED_ALONE.
    """
    before = vars(_forced).copy()
    _forced.tile = tile
    try:
        yield
    finally:
        vars(_forced).clear()
        vars(_forced).update(before)


def choices() -> tuple:
    """A value that changes whenever products may be made in another way, on any device."""
    return lookup.generation(), hasattr(_forced, "tile"), getattr(_forced, "tile", None)


@functools.lru_cache(maxsize=4096)
def _tile(generation: int, key: ProductKey) -> TileConfiguration | None:
    try:
        table = lookup.table("cuda")
    except RuntimeError:  # no GPU: programs are planned, or run in the emulator
        return default_tile(key)
    if key.op in TILED_ALONE:
        return default_tile(key, table.here.sm)
    configuration = table.configuration(key)
    if not isinstance(configuration, TileConfiguration):
        return None  # products of cuBLASLt are listed where their algorithms are looked up
    table.use(key)
    return configuration
