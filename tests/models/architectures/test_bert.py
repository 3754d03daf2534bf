"""Layers of BERT and of those that share it as fused ones."""

import pytest
import torch

import lsq
from lsq.models.architectures import LAYERS
from tests.layers.shapes import decibels
from tests.models.checks import (
    FLOAT,
    PADDING,
    WORDS,
    assert_same_alone,
    assert_same_in_float,
    assert_trains_and_comes_back,
    fused,
    left_padded,
    made,
    right_padded,
    transformers,
    without_dropout,
)

SHAPE = {
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": PADDING,
    "num_labels": 3,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model(kind: str, config: str = "BertConfig", **options) -> torch.nn.Module:
    of = getattr(transformers, config)(**SHAPE, **{**STILL, **options})
    return made(lambda: getattr(transformers, kind)(of))


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("BertForMaskedLM", "BertConfig", {}),
        (
            "BertForMaskedLM",
            "BertConfig",
            {"attn_implementation": "eager", "hidden_act": "gelu_new"},
        ),
        ("RobertaForMaskedLM", "RobertaConfig", {"hidden_act": "relu", "layer_norm_eps": 1e-5}),
    ],
)
def test_the_same_as_transformers_in_float(kind, config, options):
    plain = model(kind, config, **options)
    assert_same_in_float(plain, right_padded((9, 9, 9)))
    for batch in (right_padded((11, 7, 1)), left_padded((6, 12))):
        assert_same_in_float(plain, batch, batch["attention_mask"].bool())


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_classifiers_in_float(name):
    plain = model(f"{name}ForSequenceClassification", f"{name}Config")
    assert_same_in_float(plain, {**right_padded((11, 7, 1)), "labels": torch.tensor([0, 2, 1])})


@pytest.mark.parametrize(
    "kind", [kind for kind, file in LAYERS.items() if file == "bert.BertLayer"]
)
def test_every_layer_that_is_berts(kind):
    assert_same_alone(kind, **SHAPE, **STILL)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_trains_and_comes_back(name, tmp_path):
    assert_trains_and_comes_back(
        model(f"{name}ForMaskedLM", f"{name}Config"), right_padded((13, 8)), tmp_path
    )


def test_dropout_is_read_from_the_layer():
    mine = fused(
        model("BertModel", hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.125), FLOAT
    )
    ids, layer = right_padded((9, 9))["input_ids"], mine.encoder.layer[1]
    mine(ids)
    assert (layer.config.attention_dropout, layer.config.dropout) == (0.125, 0.25)
    without_dropout(mine)
    assert torch.equal(mine(ids).last_hidden_state, mine(ids).last_hidden_state)
    layer.output.dropout.p = 0.5
    with pytest.warns(UserWarning, match="it has different dropouts of residuals: 0.0, 0.5"):
        assert not torch.equal(mine(ids).last_hidden_state, mine(ids).last_hidden_state)


def test_a_mask_that_no_program_has():
    """Words of one sentence that do not all see the same: the layer's own pass on rounded
    weights."""
    plain = model("BertModel").eval()
    mine = fused(plain).train()
    ids = right_padded((9, 9))["input_ids"]
    mine(ids)
    mask = torch.ones(2, 1, 9, 9).tril().bool()
    expected, found = (
        one.eval()(ids, attention_mask=mask).last_hidden_state for one in (plain, mine)
    )
    assert decibels(expected, found) > 25


def test_decoders_are_left():
    for crosses, reason in ((False, "its attention is causal"), (True, "its crossattention is a")):
        report = lsq.convert(model("BertLMHeadModel", is_decoder=True, add_cross_attention=crosses))
        assert not report.fused and all(reason in one.reason for one in report.whole)
        assert report.converted
