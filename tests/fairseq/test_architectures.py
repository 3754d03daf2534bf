"""Architectures: registered, with fairseq's dimensions and lsq's defaults."""

from argparse import Namespace
from dataclasses import fields

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from lsq.commands import train
from lsq.config import QuantConfig
from lsq.fairseq import architectures, language_model
from lsq.fairseq.model import LSQTransformerModel


@pytest.mark.parametrize(
    "name",
    [
        *(f"transformer{suffix}" for suffix in architectures.SUFFIXES),
        *(f"transformer_lm{suffix}" for suffix in language_model.SUFFIXES),
    ],
)
def test_dimensions_are_those_of_fairseq(name):
    ours, theirs = Namespace(), Namespace()
    ARCH_CONFIG_REGISTRY["lsq_" + name](ours)
    ARCH_CONFIG_REGISTRY[name](theirs)
    added = {"lsq_from": None} | {
        f"lsq_{field.name}": field.default for field in fields(QuantConfig)
    }
    assert vars(ours) == vars(theirs) | added
    assert architectures.is_ours("lsq_" + name) and not architectures.is_ours(name)


def test_an_architecture_is_ours_whatever_its_name(monkeypatch):
    monkeypatch.setitem(ARCH_MODEL_REGISTRY, "tiny", LSQTransformerModel)
    given = ["data", "--arch", "tiny", "--max-tokens", "100"]
    args = train.parse_training(given, with_data=False)
    assert (args.criterion, args.task) == ("lsq_label_smoothed_cross_entropy", "lsq_translation")
    with pytest.raises(ValueError, match="tiny computes in int8 and float32"):
        train.parse_training([*given, "--fp16"], with_data=False)


def test_who_trains_what_and_given_options_win():
    args = Namespace(encoder_layers=1, lsq_bits=4)
    ARCH_CONFIG_REGISTRY["lsq_transformer_wmt_en_de_big"](args)
    assert (args.encoder_layers, args.decoder_layers, args.lsq_bits) == (1, 6, 4)
    for name in ("lsq_transformer", "transformer"):
        assert architectures.task_of(name) == "lsq_translation"
    assert architectures.model_of("lsq_transformer_wmt_en_de") is LSQTransformerModel
    with pytest.raises(
        ValueError, match="arch is 'transformer'; allowed: lsq_transformer, lsq_transformer_iwslt"
    ):
        architectures.model_of("transformer")
