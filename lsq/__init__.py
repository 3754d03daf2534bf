"""lsq trains Transformers with 8-bit integers, and translates with them; see README.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsq.commands.translator import Translator
    from lsq.config import QuantConfig
    from lsq.layers.memory import plan_memory
    from lsq.models import convert, freeze, revert, train_codes
    from lsq.observe.monitor import monitor
    from lsq.quant.declared import number_format
    from lsq.quant.tables import NumberFormat
    from lsq.study import allocate

__all__ = [
    "NumberFormat",
    "QuantConfig",
    "Translator",
    "allocate",
    "convert",
    "freeze",
    "monitor",
    "number_format",
    "plan_memory",
    "revert",
    "train_codes",
]
__version__ = "0.1.0"

_HOMES = {
    "NumberFormat": "lsq.quant.tables",
    "QuantConfig": "lsq.config",
    "Translator": "lsq.commands.translator",
    "allocate": "lsq.study",
    "convert": "lsq.models",
    "freeze": "lsq.models",
    "monitor": "lsq.observe.monitor",
    "number_format": "lsq.quant.declared",
    "plan_memory": "lsq.layers.memory",
    "revert": "lsq.models",
    "train_codes": "lsq.models",
}
_PACKAGES = ("dist", "models", "optim")


def __getattr__(name: str) -> object:
    """Import a public name or package at its first use: importing PyTorch takes a second."""
    if name in _PACKAGES:
        return import_module(f"lsq.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
