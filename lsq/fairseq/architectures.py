"""Architectures: fairseq's dimensions under lsq's names."""

from argparse import Namespace
from collections.abc import Callable

from fairseq.models import ARCH_MODEL_REGISTRY, register_model_architecture
from fairseq.models.transformer import transformer_legacy
from omegaconf import DictConfig

from lsq.fairseq import options
from lsq.fairseq.model import MODEL, LSQModel

SUFFIXES = ("", "_iwslt_de_en", "_wmt_en_de", "_wmt_en_de_big")
"""fairseq's transformer<suffix> is lsq_transformer<suffix> here."""


def register(model: str, name: str, of_fairseq: Callable[[Namespace], None]) -> None:
    """Register an architecture of a model, with the dimensions that `of_fairseq` fills in."""

    def fill_in(given: Namespace | DictConfig) -> None:
        with options.as_namespace(given, ARCH_MODEL_REGISTRY[name]) as args:
            of_fairseq(args)
            options.set_defaults(args)

    register_model_architecture(model, name)(fill_in)


def task_of(architecture: str) -> str:
    """Return the default task of a training of this architecture."""
    return getattr(ARCH_MODEL_REGISTRY.get(architecture), "task", LSQModel.task)


def is_ours(architecture: str) -> bool:
    """Return whether the architecture is of a model of lsq."""
    return issubclass(ARCH_MODEL_REGISTRY.get(architecture, object), LSQModel)


def model_of(architecture: str) -> type[LSQModel]:
    """Return the class of the architecture's model; ValueError if it is not of lsq."""
    if not is_ours(architecture):
        raise ValueError(
            f"arch is {architecture!r}; allowed: {', '.join(filter(is_ours, ARCH_MODEL_REGISTRY))}"
        )
    return ARCH_MODEL_REGISTRY[architecture]


for _suffix in SUFFIXES:
    _name = f"transformer{_suffix}" if _suffix else "base_architecture"
    register(MODEL, MODEL + _suffix, getattr(transformer_legacy, _name))
