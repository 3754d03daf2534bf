"""State that products of a GPU depend on: a tile that somebody forces, and the generation of tuned
files. `lsq.gemm.lookup.cuda_tile` says which tile runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsq.gemm.configuration import TileConfiguration

# Who compares all ways forces one within its thread; everything that runs there follows.
_forced = threading.local()
_generation = 0


@contextmanager
def ended_by(tile: "TileConfiguration | None") -> Iterator[None]:
    """Force the answer of `cuda_tile` within this context and thread, to compare, count or compile
    all ways. None leaves products to cuBLASLt, but those of TILED_ALONE.
    """
    before = vars(_forced).copy()
    _forced.tile = tile
    try:
        yield
    finally:
        vars(_forced).clear()
        vars(_forced).update(before)


def choices() -> tuple:
    """Return the generation of tuned files, whether a tile is forced here, and that tile: the value
    changes whenever products may be made in another way, on any device."""
    return _generation, hasattr(_forced, "tile"), getattr(_forced, "tile", None)


def ask_again() -> None:
    """Forget the tiles of products: other files are used."""
    global _generation
    _generation += 1
