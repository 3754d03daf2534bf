"""Layers whose heads share keys, or that look at places: against the float64 reference, and while
decoding."""

from dataclasses import replace

import pytest
import torch

from lsq.config import RelativeBias
from lsq.layers import (
    MultiheadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    TransformerLanguageModel,
    programs,
)
from lsq.layers.packing import Packing
from lsq.layers.positions import bucket_of_distances, position_inputs
from lsq.run.backends import backend
from tests.layers.oracle import compare_with_reference
from tests.layers.reference import buckets
from tests.layers.shapes import ATTENTIONS, HIDDEN, config_of, decibels, gradients, padding_mask

TIME, BATCH = 9, 3


@pytest.mark.parametrize("name", ATTENTIONS)
def test_layers_equal_the_reference(name):
    config = config_of(attention=ATTENTIONS[name], norm="rms", pre_norm=True, dropout=0.2)
    # the reference computes padding: it must see a word
    mask = None if config.window else padding_mask(BATCH, TIME)
    compare_with_reference(
        TransformerEncoderLayer(config, causal=True),
        config,
        lambda layer, x: layer(x, mask),
        lambda layer, x: layer.encoder_layer(x, mask, causal=True),
        lambda: (torch.randn(TIME, BATCH, HIDDEN),),
        padding=mask,
    )


@pytest.mark.parametrize("name", ["grouped", "all"])
def test_a_decoder_with_a_memory(name):
    """Grouped queries in both attentions; what turns or has a window is self-attention alone."""
    config = config_of(attention=ATTENTIONS[name], clip_gradient="lsq")
    compare_with_reference(
        TransformerDecoderLayer(config),
        config,
        lambda layer, x, memory: layer(x, memory),
        lambda layer, x, memory: layer.decoder_layer(x, memory),
        lambda: (torch.randn(TIME, BATCH, HIDDEN), torch.randn(5, BATCH, HIDDEN)),
    )


@pytest.mark.parametrize("mode", ["float", "int8"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_words_one_by_one(name, mode):
    """Decoding makes what the whole sentence makes; the codes that it keeps have turned."""
    layer = TransformerEncoderLayer(config_of(attention=ATTENTIONS[name], mode=mode), causal=True)
    x = torch.randn(TIME, BATCH, HIDDEN)
    layer(x)
    layer.eval()
    with torch.no_grad():
        whole, state = layer(x), {}
        steps = torch.stack([layer.step(one, state) for one in x])
    torch.testing.assert_close(steps, whole, atol=0.05 if mode == "int8" else 1e-5, rtol=0.0)


def test_a_decoder_layer_one_by_one():
    layer = TransformerDecoderLayer(config_of(attention=ATTENTIONS["all"], mode="float"))
    x, memory = torch.randn(TIME, BATCH, HIDDEN), torch.randn(5, BATCH, HIDDEN)
    layer.eval()
    with torch.no_grad():
        whole, state = layer(x, memory), {}
        steps = torch.cat([layer(one[None], memory, state=state) for one in x])
    torch.testing.assert_close(steps, whole, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    "kind", ["reference", pytest.param("emulated", marks=pytest.mark.thorough)]
)
def test_on_another_backend(kind):
    config = config_of(
        attention=ATTENTIONS["all"] | {"heads": 2, "kv_heads": 1, "head_width": 16}, backward="int8"
    )
    layer = TransformerEncoderLayer(config, causal=True)
    x = torch.randn(TIME, BATCH, HIDDEN, requires_grad=True)
    layer(x)
    layer.eval()
    torch.manual_seed(3)
    wanted = gradients(layer, layer(x), x)
    other = TransformerEncoderLayer(config, causal=True)
    other.backend = backend(kind)
    other.load_state_dict(layer.state_dict())
    other.eval()
    torch.manual_seed(3)
    for name, found in gradients(other, other(x), x).items():
        assert (found - wanted[name]).norm() < 0.05 * wanted[name].norm() + 1e-3, name


def test_int8_gradients_are_close():
    x, found = torch.randn(TIME, BATCH, HIDDEN, requires_grad=True), []
    for backward in ("float", "int8"):
        torch.manual_seed(2)
        layer = TransformerEncoderLayer(
            config_of(attention=ATTENTIONS["all"], backward=backward), causal=True
        )
        found.append(gradients(layer, layer(x), x))
    exact, rounded = found
    for name in (
        "input 0",
        "self_attn.qkv_weight",
        "self_attn.qkv_bias",
        "self_attn.query_norm.weight",
    ):
        assert decibels(exact[name], rounded[name]) > 30, name


def test_a_language_model_learns_and_decodes():
    config = config_of(attention=ATTENTIONS["all"], norm="rms", pre_norm=True, backward="int8")
    model = TransformerLanguageModel(32, config, layers=1, padding_idx=1)
    words = torch.randint(2, 32, (4, 12))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(12):
        loss, _ = model(words[:, :-1], words[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.eval()
    states, whole = {}, model(words[:, :5])
    for count in range(1, 6):
        found = model.next_word(words[:, :count], states)
    torch.testing.assert_close(found, whole[:, -1], atol=0.1, rtol=0.05)


def test_biases_that_look_both_ways():
    config = config_of(attention=ATTENTIONS["biases"])
    mask = padding_mask(BATCH, TIME)
    compare_with_reference(
        TransformerEncoderLayer(config),
        config,
        lambda layer, x: layer(x, mask),
        lambda layer, x: layer.encoder_layer(x, mask),
        lambda: (torch.randn(TIME, BATCH, HIDDEN),),
        padding=mask,
    )


def test_biases_of_a_shared_table():
    """The table comes along with a pass, and its gradient goes back where it is from."""
    torch.manual_seed(1)
    own = TransformerEncoderLayer(config_of(attention=ATTENTIONS["biases"]))
    shared = replace(own.config, relative_bias=replace(own.config.relative_bias, shared=True))
    other = TransformerEncoderLayer(shared)
    assert other.load_state_dict(own.state_dict(), strict=False).unexpected_keys == [
        "self_attn.relative_bias"
    ]
    x, table = (
        torch.randn(TIME, HIDDEN),
        own.self_attn.relative_bias.detach().clone().requires_grad_(),
    )
    packing = Packing(shape=(1, TIME))
    inputs = {"x": x, "cu_seqlens": packing.cu_seqlens}
    inputs |= position_inputs(shared, packing.positions, TIME, causal=False, table=table)
    (found,) = other.execute(
        programs.encoder_layer(shared, packing.sentences, other.mode(x)), inputs
    )
    expected = own(x[:, None])[:, 0]
    assert torch.equal(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    assert torch.equal(table.grad, own.self_attn.relative_bias.grad)
    assert table.grad.norm() > 0
    with pytest.raises(ValueError, match="this layer is given no table; leave `shared` out"):
        other(x[:, None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"buckets": 8, "farthest": 6}])
def test_buckets_are_t5s(options, causal):
    relative = RelativeBias(**options)
    wanted = buckets(relative, 2 * relative.farthest, causal)
    found = bucket_of_distances(relative, causal)
    places, limit = torch.arange(len(wanted)), relative.farthest
    assert torch.equal(found[(places - places[:, None]).clamp(-limit, limit) + limit], wanted)


def test_refusals():
    with pytest.raises(ValueError, match="window is 3, but only causal self-attention has one"):
        TransformerEncoderLayer(config_of(attention=ATTENTIONS["window"]))
    layer = MultiheadAttention(config_of(attention=ATTENTIONS["window"]))
    with pytest.raises(ValueError, match="window is 3, but only causal"):
        layer(torch.randn(2, 1, HIDDEN))
    assert layer(torch.randn(2, 1, HIDDEN), causal=True).shape == (2, 1, HIDDEN)
    with pytest.raises(ValueError, match="sentence of 65 words has no more than 64 places"):
        TransformerEncoderLayer(config_of(attention=ATTENTIONS["rotary"]))(
            torch.randn(65, 1, HIDDEN)
        )
