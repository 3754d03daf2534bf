"""lsq trains Transformers with 8-bit integers, and translates with them; see README.md."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsq.translate import Translator

__all__ = ["Translator"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`lsq.Translator`, imported when it is used first: PyTorch takes a second."""
    if name == "Translator":
        from lsq.translate import Translator

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
