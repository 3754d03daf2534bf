"""Other people's models in int8: `convert` changes their linear layers and known whole layers to
lsq's, `revert` changes them back."""

from importlib import import_module
from typing import TYPE_CHECKING

from lsq import extras

if TYPE_CHECKING:
    from lsq.models.clips import average_clips, load_clips, save_clips
    from lsq.models.conversion import convert, float_state_dict, revert
    from lsq.models.frozen import Frozen, freeze
    from lsq.models.report import Layer, Report
    from lsq.models.sparsity import Pruning, Sparsity, sparsify, sparsity_of
    from lsq.models.trainer import LsqCallback

_HOMES = {
    **dict.fromkeys(("average_clips", "load_clips", "save_clips"), "clips"),
    **dict.fromkeys(("convert", "float_state_dict", "revert"), "conversion"),
    **dict.fromkeys(("Frozen", "freeze"), "frozen"),
    **dict.fromkeys(("Layer", "Report"), "report"),
    **dict.fromkeys(("Pruning", "Sparsity", "sparsify", "sparsity_of"), "sparsity"),
    "LsqCallback": "trainer",
}

__all__ = [
    "Frozen",
    "Layer",
    "LsqCallback",
    "Pruning",
    "Report",
    "Sparsity",
    "average_clips",
    "convert",
    "float_state_dict",
    "freeze",
    "load_clips",
    "revert",
    "save_clips",
    "sparsify",
    "sparsity_of",
]


def __getattr__(name: str) -> object:
    """Imported when it is used first: LsqCallback needs transformers, the others do not."""
    if name in _HOMES:
        if name == "LsqCallback":
            extras.require(name, "huggingface")
        return getattr(import_module(f"lsq.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
