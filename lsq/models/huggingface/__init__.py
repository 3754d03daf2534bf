"""Hugging Face: lsq in transformers' Trainer, and the clips of its models in files.

See docs/models.md.
"""

import sys
import warnings
from importlib import import_module, util
from typing import TYPE_CHECKING

from lsq import extras

if TYPE_CHECKING:
    from lsq.models.huggingface.callback import LsqCallback
    from lsq.models.huggingface.clip_files import load_clips, save_clips
    from lsq.models.huggingface.workers import average_clips

__all__ = ["LsqCallback", "average_clips", "load_clips", "save_clips"]

_HOMES = {
    "LsqCallback": "callback",
    "average_clips": "workers",
    "load_clips": "clip_files",
    "save_clips": "clip_files",
}


def __getattr__(name: str) -> object:
    """Imported when it is used first: LsqCallback needs transformers, the others do not."""
    if name in _HOMES:
        if name == "LsqCallback":
            extras.require(name, "huggingface")
        return getattr(import_module(f"lsq.models.huggingface.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _keep_broken_torchaudio_out() -> None:
    """transformers imports torchaudio wherever it is installed, and fails with it where it does not
    fit PyTorch."""
    loaded = {"transformers", "torchaudio"} & sys.modules.keys()
    if not loaded and util.find_spec("transformers") and util.find_spec("torchaudio"):
        try:
            import_module("torchaudio")
        except (ImportError, OSError) as error:
            sys.modules["torchaudio"] = None
            warnings.warn(
                "torchaudio is installed but cannot be loaded"
                f" ({str(error).partition(chr(10))[0][:100]}); it is left "
                "out, so that transformers works without it",
                stacklevel=3,
            )


_keep_broken_torchaudio_out()
