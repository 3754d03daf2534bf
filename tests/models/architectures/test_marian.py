"""Layers of Marian, BART, mBART, M2M100 and Pegasus as fused ones: encoders, and decoders that
attend to them."""

import pytest
import torch

import lsq
from lsq.models.architectures.marian import DecoderLayer, EncoderLayer
from tests.layers.shapes import decibels
from tests.models.checks import (
    FLOAT,
    PADDING,
    WORDS,
    assert_same_in_float,
    assert_trains_and_comes_back,
    fused,
    left_padded,
    made,
    right_padded,
    transformers,
    words,
)

SHAPE = {
    "vocab_size": WORDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
MAKERS = {
    "marian": lambda: transformers.MarianMTModel(
        transformers.MarianConfig(**SHAPE, activation_function="swish")
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SHAPE)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**SHAPE)),
    "m2m100": lambda: transformers.M2M100ForConditionalGeneration(
        transformers.M2M100Config(**SHAPE)
    ),
    "pegasus": lambda: transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(**SHAPE)
    ),
}
LAYERS = 4


def pairs(
    source: tuple[int, ...], target: tuple[int, ...], padded=right_padded
) -> tuple[dict, torch.Tensor]:
    """A batch of sentences and their translations of these lengths, and bool [B, T], where the
    latter are."""
    given, wanted = padded(source), right_padded(target)
    batch = {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "labels": wanted["labels"],
    }
    return batch, wanted["attention_mask"].bool()


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_as_transformers_in_float(name):
    model = made(MAKERS[name])
    assert_same_in_float(model, *pairs((9, 5, 3), (2, 7, 6)), LAYERS)
    if name == "marian":
        assert_same_in_float(model, *pairs((4, 4), (7, 7)), LAYERS)
        assert_same_in_float(model, *pairs((3, 8), (5, 4), left_padded), LAYERS)


@pytest.mark.parametrize("name", ["marian", "mbart"])
def test_trains_and_comes_back(name, tmp_path):
    assert_trains_and_comes_back(made(MAKERS[name]), right_padded((13, 8)), tmp_path, LAYERS)


def test_masks_of_another_attention():
    model = made(MAKERS["bart"])
    model.set_attn_implementation("eager")
    batch, present = pairs((9, 5), (6, 7))
    assert_same_in_float(
        model, {**batch, "decoder_attention_mask": present.long()}, present, LAYERS
    )


@pytest.mark.parametrize("frozen", ["encoder", "decoder"])
def test_one_half_is_frozen(frozen):
    """Gradients reach the encoder through a decoder that is not trained, and are not computed where
    nobody asks."""
    model = made(MAKERS["bart"])
    model.model.shared.requires_grad_(False)
    getattr(model.model, frozen).requires_grad_(False)
    assert_same_in_float(model, *pairs((9, 5), (6, 7)), LAYERS)
    batch, _ = pairs((9, 5), (6, 7))
    mine = fused(model, layers=LAYERS)
    mine(**batch).loss.backward()
    assert {
        name.split(".")[1] for name, one in mine.named_parameters() if one.grad is not None
    } == ({"encoder", "decoder"} - {frozen})


def test_decoding_with_a_cache():
    model = made(MAKERS["marian"]).eval()
    mine = fused(model, layers=LAYERS)
    batch, _ = pairs((9, 5), (9, 5))
    mine.train()(**batch)
    mine.eval()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    target = mine.generate(**source, max_new_tokens=6, min_new_tokens=6, num_beams=2)
    assert target.shape == (2, 7)
    whole = mine(**source, decoder_input_ids=target, use_cache=False).logits
    past, steps = None, []
    for word in target.split(1, dim=1):
        output = mine(**source, decoder_input_ids=word, past_key_values=past, use_cache=True)
        past, steps = output.past_key_values, [*steps, output.logits]
    assert decibels(whole, torch.cat(steps, dim=1)) > 25


def test_what_has_no_program_is_the_layers_own_pass():
    model = made(MAKERS["marian"])
    mine = fused(model, FLOAT, LAYERS)
    states, memory = torch.randn(2, 3, 64), torch.randn(2, 4, 64)
    each = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    each[1, 0, 2, :2] = False
    for given in ({"encoder_hidden_states": memory, "encoder_attention_mask": each}, {}):
        expected, found = (
            one.model.decoder.layers[0](states, None, **given) for one in (model, mine)
        )
        torch.testing.assert_close(found, expected)


def test_probabilities_of_attention():
    model = made(MAKERS["bart"]).eval()
    model.set_attn_implementation("eager")
    batch = {"input_ids": words(2, 6), "decoder_input_ids": words(2, 5), "output_attentions": True}
    expected, found = model(**batch), fused(model, layers=LAYERS).eval()(**batch)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(found[name]) == 2
        assert decibels(expected[name][1], found[name][1]) > 20
    both = fused(model, layers=LAYERS)(**batch, output_hidden_states=True)
    assert len(both.decoder_hidden_states) == len(both.encoder_hidden_states) == 3


def test_dropout_is_read_where_it_is():
    shape = SHAPE | {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    model = transformers.BartModel(transformers.BartConfig(**shape))
    for kind, layer in (
        (EncoderLayer, model.encoder.layers[0]),
        (DecoderLayer, model.decoder.layers[0]),
    ):
        config = kind.config_of(layer, FLOAT)
        assert (config.dropout, config.attention_dropout, config.activation_dropout) == (
            0.1,
            0.2,
            0.3,
        )
        assert (config.activation, config.pre_norm, config.head_columns) == (
            "gelu",
            False,
            64 // config.heads,
        )


def test_layers_that_differ_inside_are_not_fused():
    model = made(MAKERS["marian"])
    model.model.decoder.layers[0].encoder_attn.dropout = 0.5
    model.model.encoder.layers[1].fc1 = torch.nn.Linear(64, 80, bias=False)
    report = lsq.convert(model)
    assert {one.name: one.reason for one in report.whole if one.reason} == {
        "model.decoder.layers.0": "it has different dropouts of attention: 0.0, 0.5",
        "model.encoder.layers.1": "some of its projections have a bias and others have none",
    }
