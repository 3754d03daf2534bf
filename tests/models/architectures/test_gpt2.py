"""Layers of GPT-2 as fused ones."""

import re

import pytest
import torch

import lsq
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
    without_dropout,
    words,
)

SHAPE = {
    "vocab_size": WORDS,
    "n_layer": 2,
    "n_embd": 64,
    "n_inner": 80,
    "n_head": 4,
    "n_positions": 32,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def gpt2(**options) -> torch.nn.Module:
    return made(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**SHAPE, **{**STILL, **options})
        )
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "attn_implementation": "eager",
        },
        {"scale_attn_weights": False, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    ],
)
def test_the_same_as_transformers_in_float(options):
    model = gpt2(**options)
    assert_same_in_float(model, right_padded((9, 9, 9)))
    for batch in (right_padded((11, 7, 1)), left_padded((6, 12))):
        assert_same_in_float(model, batch, batch["attention_mask"].bool())


def test_trains_and_comes_back(tmp_path):
    assert_trains_and_comes_back(gpt2(), right_padded((13, 8)), tmp_path)


def test_dropout_is_read_from_the_layer():
    mine = fused(gpt2(attn_pdrop=0.125, resid_pdrop=0.25), FLOAT)
    batch, layer = right_padded((9, 9)), mine.transformer.h[0]
    first, second = (mine(**batch).logits for _ in range(2))
    assert (layer.config.attention_dropout, layer.config.dropout) == (0.125, 0.25)
    assert decibels(first, second) < 25
    without_dropout(mine)
    assert torch.equal(mine(**batch).logits, mine(**batch).logits)
    assert (layer.config.attention_dropout, layer.config.dropout) == (0.0, 0.0)


def test_decoding_with_a_cache():
    mine = fused(gpt2())
    mine.train()(**right_padded((12, 12)))
    mine.eval()
    whole = mine.generate(words(2, 5), max_new_tokens=6, do_sample=False)
    assert decibels(mine(whole, use_cache=False).logits, mine(whole, use_cache=True).logits) > 25
    past = mine(whole[:, :7], use_cache=True).past_key_values
    steps = mine(whole[:, 7:], past_key_values=past, use_cache=True).logits
    assert decibels(mine(whole, use_cache=True).logits[:, 7:], steps) > 25


def test_frozen_layers_have_no_gradient():
    mine = fused(gpt2())
    mine.transformer.h[0].requires_grad_(False)
    mine(**right_padded((13, 8))).loss.backward()
    assert all(parameter.grad is None for parameter in mine.transformer.h[0].parameters())
    trained = [
        parameter for parameter in mine.transformer.h[1].parameters() if parameter.requires_grad
    ]
    assert trained and all(parameter.grad is not None for parameter in trained)
    assert mine.transformer.wpe.weight.grad[:12].any(dim=1).all()


def spoil_dropout(layer):
    layer.mlp.dropout.p = 0.5


def spoil_norm(layer):
    layer.ln_1 = torch.nn.RMSNorm(64)


def spoil_activation(layer):
    layer.mlp.act = torch.nn.Tanh()


def spoil_epsilon(layer):
    layer.ln_1.eps = 0.5


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_dropout, "it has different dropouts of residuals: 0.0, 0.5"),
        (spoil_norm, "its ln_1 is a torch.*RMSNorm"),
        (spoil_activation, "its activation is Tanh; there are"),
        (spoil_epsilon, "it has different epsilons of norms: 0.5, 1e-05"),
    ],
)
def test_layers_that_no_program_is_for(spoil, reason):
    model = gpt2()
    spoil(model.transformer.h[1])
    first, second = lsq.convert(model).whole
    assert first.reason is None
    assert re.search(reason, second.reason)


def test_a_layer_of_cross_attention():
    report = lsq.convert(gpt2(add_cross_attention=True))
    assert not report.fused and all("its crossattention is a" in one.reason for one in report.whole)
