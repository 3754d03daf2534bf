"""C++ libraries that run here, by the level of their instructions."""

import contextlib
from unittest import mock

from lsq.native import loader, sources, tiles

LEVELS = [
    level
    for level, needed in loader._REQUIRED.items()
    if needed <= loader.cpu_features() and (loader._FOLDER / f"libcpu_{level}.so").exists()
]


@contextlib.contextmanager
def library_of(level: str):
    """Within this context lsq runs the loops of that level."""
    library = sources.load(loader._FOLDER / f"libcpu_{level}.so", "cpu")
    with mock.patch.object(loader, "library", lambda: library):
        tiles.usable.cache_clear()
        try:
            yield
        finally:
            tiles.usable.cache_clear()
