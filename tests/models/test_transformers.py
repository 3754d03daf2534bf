"""Models of Hugging Face transformers: which layers are converted, and vocabularies."""

import copy

import pytest
import torch

import lsq
from tests.layers.shapes import decibels
from tests.models.zoo import WORDS, made, right_padded, transformers

SHAPE = {
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BATCH = right_padded((17, 17, 17))


@pytest.mark.parametrize(
    ("name", "converted", "left"), [("gpt2", 9, 0), ("llama", 15, 0), ("bert", 13, 1)]
)
def test_linear_layers_are_converted(name, converted, left):
    report = lsq.convert(made(name))
    assert (len(report.converted), len(report.left)) == (converted, left)


def test_experts_are_reported():
    """Their weights are one parameter of three dimensions; no program knows such layers."""
    torch.manual_seed(1)
    config = transformers.MixtralConfig(num_local_experts=4, **SHAPE)
    model = transformers.MixtralForCausalLM(config)
    report = lsq.convert(model)
    assert len(report.converted) == 9 and report.unknown == "MixtralForCausalLM"
    assert {one.name.rpartition(".")[2]: one.shape for one in report.stacks} == {
        "gate_up_proj": (4, 256, 64),
        "down_proj": (4, 64, 128),
    }
    assert len(report.stacks) == 4
    model(**BATCH).loss.backward()
    llama = made("llama")
    assert lsq.convert(llama, skip="lm_head").unknown is lsq.convert(llama).unknown is None
    assert lsq.convert(made("llama"), fused=False).unknown is None
    assert not lsq.convert(made("vit")).stacks


def test_the_vocabulary_of_qwen_trains():
    """151,936 words: more than one int32 sum of the head's backward product has room for."""
    model = made("qwen3", vocab_size=151_936, num_hidden_layers=1)
    words = torch.randint(151_936, (2, 7))
    hidden = model.model.norm.weight
    right = model(input_ids=words, labels=words).loss
    (slope,) = torch.autograd.grad(right, hidden)
    assert lsq.convert(model).fused
    loss = model(input_ids=words, labels=words).loss
    assert abs(loss - right) < 0.01
    (found,) = torch.autograd.grad(loss, hidden)
    assert decibels(slope, found) > 10


@pytest.mark.parametrize("words", [WORDS + 7, WORDS - 30, 40 * WORDS])
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_added_and_taken_away(words, tied):
    model = made("llama", num_hidden_layers=1, tie_word_embeddings=tied)
    tokens = torch.randint(2, WORDS - 30, (2, 12), generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    lsq.convert(model)
    model(tokens, labels=tokens).loss.backward()
    model.zero_grad()
    for one in (plain, model):
        torch.manual_seed(2)
        one.resize_token_embeddings(words, mean_resizing=False)
    for training in (False, True):
        found, wanted = (one.train(training)(tokens, labels=tokens).loss for one in (model, plain))
        assert found.item() == pytest.approx(wanted.item(), rel=1e-2)
        found.backward()
    assert model.model.embed_tokens.weight.grad.shape == (words, SHAPE["hidden_size"])
    model.eval().generate(tokens[:, :4], max_new_tokens=2, do_sample=False)
    assert decibels(plain.eval()(tokens).logits, model(tokens).logits) > 25
