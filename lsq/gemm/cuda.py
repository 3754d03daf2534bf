"""Which products of a GPU's operations one kernel makes together with the epilogue: as tuned, or by
a rule."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lsq.gemm.operations import TILED_ALONE, is_long

if TYPE_CHECKING:
    from lsq.gemm.configuration import TileConfiguration

# Who compares all ways forces one within its thread; everything that runs there follows.
_forced = threading.local()
_generation = 0


def cuda_tile(op: str, m: int, n: int, k: int) -> "TileConfiguration | None":
    """The tile of a kernel of lsq that multiplies codes [M, K] x [N, K] and applies the epilogue;
    None: cuBLASLt multiplies.

    Operations ask for their scratch memory, and again for their launches. The answer depends on the
    shape and the files of the GPU that is here; without a GPU, on the shape.

    Args:
        op: one of TILED, or of TILED_ALONE, whose tiles are those of the rule.
        m, n, k: of a product whose launches are prepared; 0 where there is nothing to multiply.

    Raises:
        ValueError: there is no such product.
    """
    if not min(m, n, k) or is_long(op, k):
        return None
    if hasattr(_forced, "tile") and (_forced.tile or op not in TILED_ALONE):
        return _forced.tile
    return _tile(_generation, op, m, n, k)


@contextmanager
def ended_by(tile: "TileConfiguration | None") -> Iterator[None]:
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
    return _generation, hasattr(_forced, "tile"), getattr(_forced, "tile", None)


def ask_again() -> None:
    """Forget the tiles of products: other files are used."""
    global _generation
    _generation += 1


@functools.lru_cache(maxsize=4096)
def _tile(generation: int, op: str, m: int, n: int, k: int) -> "TileConfiguration | None":
    from lsq.gemm.lookup import tuned_tile  # a CPU needs no files

    return tuned_tile(op, m, n, k)
