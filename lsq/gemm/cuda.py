"""State that GPU products depend on: a forced tile, and the generation of tuned files.
`lsq.gemm.lookup.cuda_tile` says which tile runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsq.gemm.configuration import TileConfiguration

_forced: ContextVar["tuple[TileConfiguration | None, ...]"] = ContextVar("forced", default=())
"""(the tile,) that `ended_by` forces in this thread; () if it forces nothing."""


class TunedFiles:
    """The tuned files of this process. `named`: the SearchedFiles that `set_files` was given; None:
    search. `table`: their Table, once a product was looked up. `generation`: changes with the
    files."""

    def __init__(self):
        self.lock, self.generation = threading.Lock(), 0
        self.named: list | None = None
        self.table: Any = None

    def use(self, named: list | None) -> None:
        with self.lock:
            self.named, self.table, self.generation = named, None, self.generation + 1


files = TunedFiles()
"""A registry, since files hold for the whole process: all layers and threads."""


@contextmanager
def ended_by(tile: "TileConfiguration | None") -> Iterator[None]:
    """Force the answer of `cuda_tile` within this context and thread, to compare, count or compile
    tiles. None: cuBLASLt multiplies, except for TILED_ALONE."""
    token = _forced.set((tile,))
    try:
        yield
    finally:
        _forced.reset(token)


def choices() -> tuple:
    """Return (generation of tuned files, whether a tile is forced here, that tile). The value
    changes whenever products may be made differently, on any device."""
    forced = _forced.get()
    return files.generation, bool(forced), forced[0] if forced else None
