"""Architectures: fairseq's dimensions under lsq's names."""

from argparse import Namespace
from collections.abc import Callable

from fairseq.models import register_model_architecture
from fairseq.models.transformer import transformer_legacy

from lsq.fairseq import options
from lsq.fairseq.model import MODEL

SUFFIXES = ("", "_iwslt_de_en", "_wmt_en_de", "_wmt_en_de_big")
"""fairseq's transformer<suffix> is lsq_transformer<suffix> here."""


MODEL_ARCHITECTURES = tuple(MODEL + suffix for suffix in SUFFIXES)


def _architecture(of_fairseq: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    def fill_in(args: Namespace) -> None:
        of_fairseq(args)
        options.set_defaults(args)

    return fill_in


def _fairseq_architecture(suffix: str) -> Callable[[Namespace], None]:
    name = f"transformer{suffix}" if suffix else "base_architecture"
    return getattr(transformer_legacy, name)


for _suffix in SUFFIXES:
    register_model_architecture(MODEL, MODEL + _suffix)(_architecture(_fairseq_architecture(_suffix)))
