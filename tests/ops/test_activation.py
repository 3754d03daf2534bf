"""bias_activation_dropout and its gradient: accuracy against float64, dropout, every kind of product."""

import math

import pytest
import torch

from lsq.ops import random as philox_random
from lsq.ops.rounding import round_activation
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.ops.compare import KEY, assert_accurate, compare, compare_program, fused
from tests.ops.operands import KINDS, ROWS, clipped_bits, product_of

CLIP = torch.tensor([0.8])
PLAIN = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("options", [
    {}, {"clip_gradient": "lsq", "bits": 4}, {"backward": "int8"}, {"mode": "float"}
])
def test_in_a_program(rows, activation, options):
    config = config_of(activation=activation, dropout=0.2, **options)
    seen = compare_program(layers.feed_forward(config, rows, True, True))
    assert {"bias_activation_dropout", "bias_activation_dropout_backward"} <= seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("clip", [None, CLIP])
def test_every_kind_of_product(kind, activation, dropout, clip):
    y, scale = product_of(kind, 41, 48)
    bias = torch.randn(48)
    options = {"activation": activation, "dropout": dropout, "stream": 3, "bits": 8}
    found, *rounded = compare("bias_activation_dropout", y, scale, bias, clip, KEY, **options, error=clip is not None)
    values = PLAIN[activation]((y if scale is None else y * scale) + bias)
    values = philox_random.dropout(values, dropout, KEY, 3)
    if clip is None:
        torch.testing.assert_close(found, values, atol=1e-6, rtol=1e-5)
    else:
        codes, *_ = round_activation(values, CLIP, bits=8, error=True)
        assert (found != codes).float().mean() < 0.001


def accuracy_points():
    """Values around 0, where GELU bends, and far out on both sides."""
    return torch.cat([torch.linspace(-12, 12, 4801), torch.randn(4000), torch.tensor([-90.0, 90.0, -1e-6, 1e-20, 0.0])])


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_values_are_as_accurate_as_torch(activation):
    x = accuracy_points()[None]
    (found, *_) = fused(
        "bias_activation_dropout", x, None, torch.zeros(x.shape[1]), None, KEY,
        activation=activation, dropout=0.0, stream=1, bits=8,
    )
    assert_accurate(found, PLAIN[activation](x.double()), PLAIN[activation](x))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_gradients_are_as_accurate_as_torch(activation):
    x = accuracy_points()[None]
    x = x[x != 0][None]
    upstream = torch.randn_like(x)

    def by_autograd(dtype):
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(PLAIN[activation](leaf), leaf, upstream.to(dtype))[0]

    dy, _, _, dbias = fused(
        "bias_activation_dropout_backward", upstream, x, None, None, None, torch.zeros(x.shape[1]), None, KEY,
        activation=activation, dropout=0.0, stream=1, bits=8,
    )
    assert_accurate(dy, by_autograd(torch.float64), by_autograd(torch.float32))
    assert torch.equal(dbias, dy[0])


def test_gelu_far_out():
    x = torch.tensor([[1e30, -1e30, 3e38, -3e38, math.inf, 40.0, -40.0]])
    (found, *_) = fused(
        "bias_activation_dropout", x, None, torch.zeros(7), None, KEY,
        activation="gelu", dropout=0.0, stream=1, bits=8,
    )
    assert torch.equal(found[0, [0, 2, 4, 5]], x[0, [0, 2, 4, 5]])
    assert not found[0, [1, 3, 6]].any()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("clip", [None, CLIP])
def test_nan_is_not_swallowed(activation, clip):
    y = torch.randn(7, 16)
    y[3, 5] = math.nan
    found, scale, *_ = compare(
        "bias_activation_dropout", y, None, torch.zeros(16), clip, KEY,
        activation=activation, dropout=0.0, stream=1, bits=8,
    )
    assert (found.isnan().nonzero().tolist() == [[3, 5]]) if clip is None else scale.isnan()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_gradients_of_every_kind_of_product(kind, rounded, activation):
    y, scale = product_of(kind, 41, 48)
    clipped = clipped_bits(y) if kind == "int8" else None
    error = torch.rand(41, 48) - 0.5 if kind == "int8" else None
    options = {"gradient_stream": 8} if rounded else {}
    dy, row_scale, dclip, _ = compare(
        "bias_activation_dropout_backward", torch.randn(41, 48), y, scale, clipped, error, torch.randn(48),
        0.5 + torch.rand(48) if rounded else None, KEY,
        activation=activation, dropout=0.2, stream=3, bits=8, **options,
    )
    assert dy.dtype == (torch.int8 if rounded else torch.float32)
    assert (row_scale is not None) == rounded and (dclip is not None) == (kind == "int8")


def test_backward_drops_what_forward_dropped():
    y = 1 + torch.rand(41, 48)
    options = {"activation": "relu", "dropout": 0.4, "stream": 6, "bits": 8}
    (forward, *_) = fused("bias_activation_dropout", y, None, torch.zeros(48), None, KEY, **options)
    dy, *_ = fused(
        "bias_activation_dropout_backward", torch.ones(41, 48), y, None, None, None, torch.zeros(48), None, KEY,
        **options,
    )
    assert torch.equal(forward != 0, dy != 0)
