"""FeedForward against the float64 reference."""

import pytest
import torch

from lsq.layers import FeedForward
from tests.layers.oracle import compare_with_reference
from tests.layers.shapes import HIDDEN, config_of, gradients


def check(config, shape=(7, 3)):
    def reference(layer, x):
        return layer.feed_forward(x.reshape(1, -1, HIDDEN), "").view(x.shape)

    return compare_with_reference(
        FeedForward(config), config, lambda layer, x: layer(x), reference, lambda: (torch.randn(*shape, HIDDEN),)
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("bits", [8, 4])
def test_equals_the_reference(activation, clip_gradient, dropout, bits):
    check(config_of(activation=activation, clip_gradient=clip_gradient, dropout=dropout, bits=bits))


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


def test_a_wrong_width_is_refused():
    """Two rows of half the width would give a result of the right shape."""
    with pytest.raises(ValueError, match="96.*48"):
        FeedForward(config_of())(torch.randn(5, 2 * HIDDEN))
