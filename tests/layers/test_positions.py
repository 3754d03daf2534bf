"""Positions in self-attention: buckets, shared tables, other backends and refusals."""

from dataclasses import replace

import pytest
import torch

from lsq.config import RelativeBias
from lsq.layers import (
    MultiheadAttention,
    Packing,
    TransformerEncoderLayer,
    programs,
)
from lsq.layers.positions import bucket_of_distances, position_inputs
from lsq.run.backends import backend
from tests.layers.reference import buckets
from tests.layers.shapes import ATTENTIONS, HIDDEN, config_of, gradients

TIME, BATCH = 9, 3


@pytest.mark.parametrize(
    "kind", ["reference", pytest.param("emulated", marks=pytest.mark.thorough)]
)
def test_on_another_backend(kind):
    attention = ATTENTIONS["all"] | {"heads": 2, "kv_heads": 1, "head_width": 16}
    config = config_of(attention=attention, backward="int8")
    layer, other = (TransformerEncoderLayer(config, causal=True) for _ in range(2))
    x = torch.randn(TIME, BATCH, HIDDEN, requires_grad=True)
    layer(x)
    other.backend = backend(kind)
    other.load_state_dict(layer.state_dict())
    wanted, found = [], []
    for one, results in ((layer, wanted), (other, found)):
        torch.manual_seed(3)
        results.append(gradients(one.eval(), one(x), x))
    for name, gradient in found[0].items():
        expected = wanted[0][name]
        assert (gradient - expected).norm() < 0.05 * expected.norm() + 1e-3, name


def test_biases_of_a_shared_table():
    """The table comes along with a pass, and its gradient goes back where it is from."""
    torch.manual_seed(1)
    own = TransformerEncoderLayer(config_of(attention=ATTENTIONS["biases"]))
    shared = replace(own.config, relative_bias=replace(own.config.relative_bias, shared=True))
    other, bias = TransformerEncoderLayer(shared), own.self_attn.relative_bias
    unexpected = other.load_state_dict(own.state_dict(), strict=False).unexpected_keys
    assert unexpected == ["self_attn.relative_bias"]
    x, table = torch.randn(TIME, HIDDEN), bias.detach().clone().requires_grad_()
    packing = Packing(shape=(1, TIME))
    inputs = {"x": x, "cu_seqlens": packing.cu_seqlens}
    inputs |= position_inputs(shared, packing.positions, TIME, causal=False, table=table)
    program = programs.encoder_layer(shared, packing.sentences, other.mode(x))
    (found,) = other.execute(program, inputs)
    expected = own(x[:, None])[:, 0]
    assert torch.equal(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    assert torch.equal(table.grad, bias.grad) and table.grad.norm() > 0
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
    rotary = TransformerEncoderLayer(config_of(attention=ATTENTIONS["rotary"]))
    with pytest.raises(
        ValueError, match="sentence of 65 words is longer than 64, the positions of Rotary"
    ):
        rotary(torch.randn(65, 1, HIDDEN))
