"""Models of Hugging Face transformers, made from configurations, and PEFT's LoRA on top."""

import copy
import sys

import pytest
import torch

import lsq
from lsq.models import float_state_dict
from lsq.optim import Adam
from tests.layers.shapes import decibels

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers")

WORDS = 512
GPT = {"n_layer": 2, "n_embd": 64, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
}
MAKERS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **GPT)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, **SHAPE)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=WORDS, **SHAPE)
    ),
}
LAYERS = {"gpt2": (9, 0), "llama": (15, 0), "bert": (13, 1)}
"""Converted, and left."""


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return MAKERS[name]().train()


def batch() -> dict[str, torch.Tensor]:
    words = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_trains_and_comes_back(name, tmp_path):
    model = made(name)
    plain = copy.deepcopy(model)
    report = lsq.convert(model)
    assert (len(report.converted), len(report.left)) == LAYERS[name]
    assert decibels(plain.eval()(**batch()).logits, model.eval()(**batch()).logits) > 25
    optimizer = Adam(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    state = float_state_dict(model)
    for saved in ("converted", "reverted"):
        model.save_pretrained(tmp_path / saved)
        again, information = type(model).from_pretrained(tmp_path / saved, output_loading_info=True)
        assert not any(information.values())
        assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
        lsq.revert(model)


def test_experts_are_reported():
    """Whose weights are one parameter of three dimensions; no whole layer of such models is
    known."""
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=WORDS, num_local_experts=4, num_key_value_heads=2, **SHAPE
    )
    model = transformers.MixtralForCausalLM(config)
    report = lsq.convert(model)
    assert len(report.converted) == 9 and report.unknown == "MixtralForCausalLM"
    assert {one.name.rpartition(".")[2]: one.shape for one in report.stacks} == {
        "gate_up_proj": (4, 256, 64),
        "down_proj": (4, 64, 128),
    }
    assert len(report.stacks) == 4
    model(**batch()).loss.backward()
    llama = made("llama")
    assert lsq.convert(llama, skip="lm_head").unknown is lsq.convert(llama).unknown is None
    assert lsq.convert(made("llama"), fused=False).unknown is None
    images = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **SHAPE))
    assert not lsq.convert(images).stacks


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_transformers(reentrant):
    model = made("llama")
    lsq.convert(model)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for one in (model, twin):
        torch.manual_seed(3)
        one(**batch()).loss.backward()
    for (name, first), second in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            first.grad, second.grad, rtol=1e-4, atol=1e-5, msg=lambda text, at=name: at + text
        )


@pytest.mark.parametrize(
    ("name", "targets"), [("gpt2", ["c_attn"]), ("llama", ["q_proj", "v_proj"])]
)
@pytest.mark.parametrize("first", ["convert", "peft"])
def test_low_rank_adapters_on_a_frozen_base(name, targets, first):
    peft = pytest.importorskip("peft")
    model = made(name)
    config = peft.LoraConfig(r=8, target_modules=targets)
    if first == "convert":
        lsq.convert(model, fused=False)
        adapted = peft.get_peft_model(model, config)
    else:
        adapted = peft.get_peft_model(model, config)
        report = lsq.convert(adapted)
        assert len(report.converted) == LAYERS[name][0]
        assert all("lora_" in layer or layer.endswith("lm_head") for layer in report.left)
    adapted(**batch()).loss.backward()
    assert all(
        "lora_" in key
        for key, parameter in adapted.named_parameters()
        if parameter.grad is not None
    )
    adapted.eval()
    with torch.no_grad():
        before = adapted(**batch()).logits
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.02)
        expected = adapted(**batch()).logits
        adapted.merge_adapter()
        assert decibels(expected, adapted(**batch()).logits) > decibels(expected, before) + 6
        adapted.unmerge_adapter()
        assert decibels(expected, adapted(**batch()).logits) > 30


def test_the_vocabulary_of_qwen_trains():
    """151,936 words: more than one int32 sum of the head's backward product has room for."""
    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 151_936,
    }
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, **heads)).train()
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
    torch.manual_seed(1)
    sizes = {**SHAPE, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, tie_word_embeddings=tied, **sizes)
    )
    tokens = torch.randint(WORDS - 30, (2, 12), generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    lsq.convert(model)
    model.train()(tokens, labels=tokens).loss.backward()
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
