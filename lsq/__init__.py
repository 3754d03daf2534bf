"""lsq trains Transformers with 8-bit integers, and translates with them; see README.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsq.conversion import convert, revert
    from lsq.monitoring import monitor
    from lsq.translate import Translator

__all__ = ["Translator", "convert", "monitor", "revert"]
__version__ = "0.1.0"

_HOMES = {
    "Translator": "lsq.translate", "convert": "lsq.conversion", "monitor": "lsq.monitoring", "revert": "lsq.conversion",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """`lsq.convert` and the others, imported when they are used first: PyTorch takes a second."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
