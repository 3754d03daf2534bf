"""FeedForward against the float64 reference."""

import pytest
import torch
from torch.nn import functional

from lsq.config import ACTIVATIONS
from lsq.layers import FeedForward
from tests.layers.oracle import compare_with_reference
from tests.layers.reference import ACTIVATIONS as PLAIN
from tests.layers.shapes import HIDDEN, assert_unbiased, config_of, gradients


def check(config, shape=(7, 3)):
    def reference(layer, x):
        return layer.feed_forward(x.reshape(1, -1, HIDDEN), "").view(x.shape)

    return compare_with_reference(
        FeedForward(config),
        config,
        lambda layer, x: layer(x),
        reference,
        lambda: (torch.randn(*shape, HIDDEN),),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("bits", [8, 4])
def test_equals_the_reference(activation, clip_gradient, dropout, bits):
    check(config_of(activation=activation, clip_gradient=clip_gradient, dropout=dropout, bits=bits))


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "squared_relu"])
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
def test_other_activations_equal_the_reference(activation, clip_gradient):
    check(config_of(activation=activation, clip_gradient=clip_gradient, dropout=0.2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "clip_gradient, bits, bias", [("pact", 8, False), ("lsq", 8, True), ("lsq", 4, False)]
)
def test_gates_equal_the_reference(activation, clip_gradient, bits, bias):
    options = {
        "clip_gradient": clip_gradient,
        "bits": bits,
        "bias": bias,
        "dropout": 0.2 if bias else 0.0,
    }
    check(config_of(activation=activation, gated=True, **options))


@pytest.mark.parametrize("shape", [(1,), (41,), (341,), (2, 3, 5)])
def test_odd_shapes(shape):
    check(config_of(activation="relu" if shape == (341,) else "gelu"), shape)


def test_float_mode_is_plain_torch():
    layer = FeedForward(config_of(mode="float", activation="gelu", inner=7, hidden=5, heads=1))
    x = torch.randn(3, 5, requires_grad=True)
    hidden = torch.nn.functional.gelu(x @ layer.fc1_weight.t() + layer.fc1_bias)
    expected = hidden @ layer.fc2_weight.t() + layer.fc2_bias
    assert torch.allclose(layer(x), expected, atol=1e-6)
    ours, theirs = gradients(layer, layer(x), x), gradients(layer, expected, x)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_in_float_mode_are_plain_torch(activation, bias):
    sizes = {"inner": 7, "hidden": 5, "heads": 1}
    layer = FeedForward(
        config_of(mode="float", activation=activation, gated=True, bias=bias, **sizes)
    )
    assert {name for name, _ in layer.named_parameters() if name.endswith("bias")} == (
        {"gate_bias", "up_bias", "fc2_bias"} if bias else set()
    )
    x = torch.randn(3, 5, requires_grad=True)
    linear = {
        name: lambda x, name=name: functional.linear(
            x, getattr(layer, name + "_weight"), getattr(layer, name + "_bias", None)
        )
        for name in ("gate", "up", "fc2")
    }
    expected = linear["fc2"](PLAIN[activation](linear["gate"](x)) * linear["up"](x))
    assert torch.allclose(layer(x), expected, atol=1e-6)
    ours, theirs = gradients(layer, layer(x), x), gradients(layer, expected, x)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


def test_rounding_the_gradients_of_a_gate_keeps_their_mean():
    layer = FeedForward(
        config_of(activation="silu", gated=True, bias=False, backward="int8", calibration_passes=0)
    )
    x = torch.randn(41, HIDDEN, requires_grad=True)
    layer(x)  # measures clips
    exact = FeedForward(config_of(activation="silu", gated=True, bias=False, calibration_passes=0))
    exact.load_state_dict(layer.state_dict())
    drawn = [gradients(layer, layer(x), x) for _ in range(60)]
    assert_unbiased(gradients(exact, exact(x), x), drawn)


def test_a_wrong_width_is_refused():
    """Two rows of half the width would give a result of the right shape."""
    with pytest.raises(ValueError, match="96.*48"):
        FeedForward(config_of())(torch.randn(5, 2 * HIDDEN))
