"""Blocks of T5 and mT5 as fused ones: encoders, decoders, and the table of biases that blocks
share."""

import copy

import pytest
import torch

import lsq
from lsq.models.architectures.t5 import DecoderBlock, EncoderBlock
from tests.layers.shapes import decibels
from tests.models.architectures.test_marian import pairs
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
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
    "pad_token_id": PADDING,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MAKERS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SHAPE)),
    "t5 v1.1": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SHAPE, **GATED)
    ),
    "mt5": lambda: transformers.MT5ForConditionalGeneration(transformers.MT5Config(**SHAPE)),
}
BLOCKS = 5


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_as_transformers_in_float(name):
    """Sentences are longer than the farthest distance; the others see every bucket or, of two
    words, few of them."""
    model = made(MAKERS[name])
    assert_same_in_float(model, *pairs((9, 5, 3), (2, 10, 6)), BLOCKS)
    if name == "t5":
        assert_same_in_float(model, *pairs((2, 2), (9, 9)), BLOCKS)
        assert_same_in_float(model, *pairs((3, 8), (5, 4), left_padded), BLOCKS)


@pytest.mark.parametrize("name", ["t5", "t5 v1.1"])
def test_trains_and_comes_back(name, tmp_path):
    assert_trains_and_comes_back(
        made(MAKERS[name]), right_padded((13, 8)), tmp_path, BLOCKS, least=20
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """Reentrant checkpoints hand on other tensors, which know nothing of the table."""
    model = made(MAKERS["t5"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_in_float(model, *pairs((9, 5), (6, 7)), BLOCKS)


@pytest.mark.parametrize("left", [0, 1])
def test_some_blocks_are_left(left):
    """Whoever makes the biases of pairs, and whoever reads them."""
    model = made(MAKERS["t5"])
    mine = copy.deepcopy(model)
    for stack in (mine.encoder, mine.decoder):
        for number, block in enumerate(stack.block):
            if number != left:
                assert lsq.convert(block, FLOAT).fused == ("",)
    batch, _ = pairs((9, 5), (6, 7))
    losses = [one(**batch).loss for one in (model, mine)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for part in ("encoder", "decoder"):
        name = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        torch.testing.assert_close(
            mine.get_parameter(name).grad, model.get_parameter(name).grad, atol=1e-6, rtol=1e-3
        )


def test_decoding_with_a_cache():
    model = made(MAKERS["t5 v1.1"]).eval()
    mine = fused(model, layers=BLOCKS)
    batch, _ = pairs((9, 5), (9, 5))
    mine.train()(**batch)
    mine.eval()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    target = mine.generate(**source, max_new_tokens=6, min_new_tokens=6)
    assert target.shape == (2, 7)
    whole = mine(**source, decoder_input_ids=target, use_cache=False).logits
    cached = mine(**source, decoder_input_ids=target, use_cache=True).logits
    assert decibels(whole, cached) > 20


def test_probabilities_of_attention():
    model = made(MAKERS["t5"]).eval()
    model.set_attn_implementation("eager")
    batch = {"input_ids": words(2, 6), "decoder_input_ids": words(2, 5), "output_attentions": True}
    expected, found = model(**batch), fused(model, layers=BLOCKS).eval()(**batch)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(found[name]) == len(expected[name])
        assert decibels(expected[name][1], found[name][1]) > 20


def test_dropout_is_read_where_it_is():
    model = transformers.T5Model(transformers.T5Config(**SHAPE | {"dropout_rate": 0.25}))
    for kind, block in (
        (EncoderBlock, model.encoder.block[1]),
        (DecoderBlock, model.decoder.block[1]),
    ):
        config = kind.config_of(block, FLOAT)
        assert (config.dropout, config.attention_dropout, config.activation_dropout) == (
            0.25,
            0.25,
            0.25,
        )
        assert (config.softmax_scale, config.norm, config.bias, config.head_columns) == (
            1.0,
            "rms",
            False,
            16,
        )
    model.decoder.block[1].layer[2].dropout.p = 0.5
    assert "decoder.block.1" not in lsq.convert(model).fused


def test_an_encoder_alone():
    model = made(lambda: transformers.T5EncoderModel(transformers.T5Config(**SHAPE)))
    batch = {name: value for name, value in right_padded((9, 4)).items() if name != "labels"}
    present, mine = batch["attention_mask"].bool(), fused(model, FLOAT, 3)
    expected, found = (one(**batch).last_hidden_state[present] for one in (model, mine))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    mine = fused(model, layers=3)
    assert decibels(expected, mine(**batch).last_hidden_state[present]) > 25


def test_float16_saturates():
    """As T5's own blocks do: values beyond float16 stay finite."""
    model = made(lambda: transformers.T5EncoderModel(transformers.T5Config(**SHAPE)))
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e7)
    mine = fused(model, FLOAT, 3)
    y, *_ = mine.encoder.block[0](torch.randn(2, 4, 64).half())
    assert y.dtype == torch.float16
    assert y.isfinite().all()
    assert y.abs().max() == torch.finfo(torch.float16).max
