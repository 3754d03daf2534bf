"""Batches without sentences, and those that are all padding, in models whose layers are fused."""

import pytest
import torch

from tests.models.architectures import test_llama, test_marian, test_t5
from tests.models.architectures.test_bert import model as bert
from tests.models.architectures.test_vit import images, vit
from tests.models.checks import fused, made, right_padded, transformers, words

MAKERS = {
    "llama": test_llama.MAKERS["llama"],
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=96, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ),
    "bert": lambda: bert("BertForMaskedLM"),
    "vit": vit,
    "marian": test_marian.MAKERS["marian"],
    "t5": test_t5.MAKERS["t5"],
}
LAYERS = {"marian": 4, "t5": 5}


def model(name: str) -> torch.nn.Module:
    return fused(made(MAKERS[name]), layers=LAYERS.get(name))


def batch(name: str, sentences: int) -> dict[str, torch.Tensor]:
    if name == "vit":
        return images(sentences)
    given = words(sentences, 7)
    return {"input_ids": given, "labels": given}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("name", MAKERS)
def test_without_sentences(name):
    """Gradients are zeros, for which DistributedDataParallel waits, and the first pass that counts
    is the next one."""
    mine, other = model(name), model(name)
    for change in (mine.train, mine.eval):
        change()
        output = mine(**batch(name, 0))
        assert output.loss.isnan() and len(output.logits) == 0
        output.loss.backward()
        assert not any(one.any() for one in gradients(mine).values())
    with torch.no_grad():
        mine(**batch(name, 0))
    mine.train()
    for one in (mine, other):
        torch.manual_seed(3)
        one.zero_grad()
        one(**batch(name, 3)).loss.backward()
    torch.testing.assert_close(gradients(mine), gradients(other), rtol=0, atol=0)
    states = mine.state_dict(), other.state_dict()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_nothing_but_padding(name):
    mine, given = model(name), right_padded((5, 3))
    given["attention_mask"] = torch.zeros_like(given["attention_mask"])
    output = mine(**given)
    assert output.logits.shape == (2, 5, 96) and output.loss.isfinite()
    output.loss.backward()
    layer = {
        name: one
        for name, one in gradients(mine).items()
        if ".layers.0." in name or ".layer.0." in name
    }
    assert layer and not any(one.any() for one in layer.values())
    mine.eval()
    with torch.no_grad():
        assert mine(**given).logits.isfinite().all()
