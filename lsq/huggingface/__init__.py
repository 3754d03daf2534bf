"""Hugging Face: lsq in transformers' Trainer, and the clips of its models in files. See docs/models.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsq.huggingface.callback import LsqCallback
    from lsq.huggingface.clip_files import load_clips, save_clips
    from lsq.huggingface.workers import average_clips

__all__ = ["LsqCallback", "average_clips", "load_clips", "save_clips"]

_HOMES = {"LsqCallback": "callback", "average_clips": "workers", "load_clips": "clip_files", "save_clips": "clip_files"}


def __getattr__(name: str) -> object:
    """Imported when it is used first: LsqCallback needs transformers, the others do not."""
    if name in _HOMES:
        return getattr(import_module(f"lsq.huggingface.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
