"""Watching fused layers of Hugging Face transformers."""

import sys

import pytest
import torch

import lsq
from tests.observe.models import batch

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers")

OUTLIERS = 3


def llama(*spikes: float) -> torch.nn.Module:
    """A Llama with outliers in the feed-forward blocks of its layers; the same function of floats
    whatever they are."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            num_hidden_layers=len(spikes),
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
        )
    )
    with torch.no_grad():
        for layer, spike in zip(model.model.layers, spikes, strict=True):
            layer.mlp.up_proj.weight[:OUTLIERS] *= spike
            layer.mlp.down_proj.weight[:, :OUTLIERS] /= spike
    lsq.convert(model)
    return model


def train(model: torch.nn.Module, monitor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
        losses.append(loss.item())
    return losses


def test_outliers_in_a_fused_layer_are_caught():
    model = llama(1.0, 1000.0)
    monitor = lsq.monitor(model, every=2)
    losses = train(model, monitor, 14)
    assert monitor.in_floats == ("model.layers.1",)
    assert set(monitor.readings) == {"model.layers.0", "lm_head"}
    assert losses[-1] < losses[0]
    layer, tokens = model.model.layers[1], batch()[:2]
    model.eval()
    with torch.no_grad():
        found = model(tokens).logits
        expected = layer.float_class.forward
        layer.forward = lambda *arguments, **options: expected(layer, *arguments, **options)
        torch.testing.assert_close(model(tokens).logits, found, rtol=1e-3, atol=1e-3)
        del layer.forward
        generated = model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 9)
    fresh = llama(1.0, 1.0)
    fresh.load_state_dict(model.state_dict())
    assert lsq.monitor(fresh).in_floats == monitor.in_floats
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(tokens).logits, found, rtol=1e-5, atol=1e-5)
