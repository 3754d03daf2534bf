"""State that products of a GPU depend on: a tile that somebody forces, and the generation of tuned
files. `lsq.gemm.lookup.cuda_tile` says which tile runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsq.gemm.configuration import TileConfiguration

_forced: ContextVar["tuple[TileConfiguration | None, ...]"] = ContextVar("forced", default=())
"""(the tile,) that whoever compares all ways forces on everything that runs in its thread."""


class TunedFiles:
    """The tuned files of this process: the SearchedFiles that were `named` (None: those that are
    found), their Table, once lsq.gemm.lookup wants it, and a number that changes with them."""

    def __init__(self):
        self.lock, self.generation = threading.Lock(), 0
        self.named: list | None = None
        self.table: Any = None

    def use(self, named: list | None) -> None:
        with self.lock:
            self.named, self.table, self.generation = named, None, self.generation + 1


files = TunedFiles()
"""A registry, since files decide for the whole process, for all layers and threads."""


@contextmanager
def ended_by(tile: "TileConfiguration | None") -> Iterator[None]:
    """Force the answer of `cuda_tile` within this context and thread, to compare, count or compile
    all ways. None leaves products to cuBLASLt, but those of TILED_ALONE.
    """
    token = _forced.set((tile,))
    try:
        yield
    finally:
        _forced.reset(token)


def choices() -> tuple:
    """Return the generation of tuned files, whether a tile is forced here, and that tile: the value
    changes whenever products may be made in another way, on any device."""
    forced = _forced.get()
    return files.generation, bool(forced), forced[0] if forced else None
