"""Sparse layers of transformers' models, whose weights are several parameters, or lie [inputs,
outputs]."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lsq
from lsq.models.sparsity import sparsify
from lsq.optim import Adam
from tests.constants import quant_with
from tests.models.architectures.test_gpt2 import gpt2
from tests.models.architectures.test_llama import MAKERS
from tests.models.checks import made, right_padded, words

BATCH = right_padded((11, 6))


@pytest.mark.parametrize("mode", ["int8", "float"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_of_transformers(kind, mode):
    model = made(MAKERS["llama"]) if kind == "llama" else gpt2()
    lsq.convert(model, quant_with(mode=mode, backward="float", calibration_passes=0))
    model(**BATCH).loss.backward()
    sparsity = sparsify(model)
    own = model.model.layers[0] if kind == "llama" else model.transformer.h[0]
    assert any("qkv" in path for path in sparsity.weights) and len(sparsity.weights) == (
        8 if kind == "gpt2" else 10
    )
    optimizer = Adam([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    sparsity.follow(optimizer)
    model.zero_grad()
    before = [one.detach().clone() for one in own.sources("self_attn.qkv_weight")]
    model(**BATCH).loss.backward()
    optimizer.step()
    assert all(
        (one != was).any()
        for one, was in zip(own.sources("self_attn.qkv_weight"), before, strict=True)
    )
    model.eval()
    with torch.no_grad():
        logits, decoded = model(**BATCH).logits, steps(model)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        sparsity.finish()
        assert torch.equal(model(**BATCH).logits, logits) and torch.equal(
            twin(**BATCH).logits, logits
        )
        torch.testing.assert_close(steps(model), decoded, rtol=0, atol=0)
    for part in own.sources("self_attn.qkv_weight"):
        groups = (part.t() if kind == "gpt2" else part).unflatten(1, (-1, 4))
        assert (groups != 0).sum(2).max() == 2


def steps(model: nn.Module) -> torch.Tensor:
    """Logits of two steps of decoding, the second by the layers' own passes."""
    first = model(words(2, 5), use_cache=True)
    return torch.cat(
        [first.logits, model(words(2, 1), past_key_values=first.past_key_values).logits], dim=1
    )
