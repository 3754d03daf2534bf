"""TransformerEncoderLayer against the float64 reference and against fairseq's own layer."""

from itertools import product

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from tests.layers.fairseq_layers import compare_with_fairseq, fairseq_layer
from tests.layers.oracle import compare_with_reference, prepare
from tests.layers.shapes import (
    HIDDEN,
    assert_unbiased,
    config_of,
    decibels,
    gradients,
    padding_mask,
)


def check(config, *, batch=3, time=7, padded=False, training=True):
    mask = padding_mask(batch, time) if padded else None
    return compare_with_reference(
        TransformerEncoderLayer(config).train(training),
        config,
        lambda layer, x: layer(x, mask),
        lambda reference, x: reference.encoder_layer(x, mask),
        lambda: (torch.randn(time, batch, config.hidden),),
        padding=mask,
    )


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_the_reference(clip_gradient, pre_norm, activation):
    for dropout, padded in product((0.0, 0.2), (False, True)):
        config = config_of(
            dropout=dropout, pre_norm=pre_norm, activation=activation, clip_gradient=clip_gradient
        )
        check(config, padded=padded)


@pytest.mark.parametrize("bits", [2, 4, 7])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_narrow_integers_equal_the_reference(bits, granularity):
    outcome = check(
        config_of(bits=bits, weight_granularity=granularity, clip_gradient="lsq", activation="gelu")
    )
    assert max(int(codes.abs().max()) for codes in outcome.codes.values()) == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("time, batch", [(1, 1), (1, 5), (13, 1), (41, 2)])
def test_odd_shapes(time, batch):
    check(config_of(dropout=0.1), time=time, batch=batch, padded=time > 1)


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gated_layers_without_biases(clip_gradient, norm):
    """What most language models have had since Llama, but for attention."""
    config = config_of(
        pre_norm=True,
        norm=norm,
        activation="silu",
        gated=True,
        bias=False,
        clip_gradient=clip_gradient,
        dropout=0.1,
    )
    assert not any(
        name.endswith("_bias") for name, _ in TransformerEncoderLayer(config).named_parameters()
    )
    check(config, padded=True)


@pytest.mark.parametrize("heads", [1, 6])
def test_other_head_widths(heads):
    check(config_of(heads=heads, pre_norm=True))


def test_without_training_nothing_is_dropped():
    config = config_of(dropout=0.5)
    mask = padding_mask(3, 7)
    compare_with_reference(
        TransformerEncoderLayer(config).eval(),
        config_of(),
        lambda layer, x: layer(x, mask),
        lambda reference, x: reference.encoder_layer(x, mask),
        lambda: (torch.randn(7, 3, HIDDEN),),
        padding=mask,
    )


def test_gradients_do_not_change_the_result():
    layer = TransformerEncoderLayer(config_of()).eval()
    x = torch.randn(7, 3, HIDDEN)
    with_gradients = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), with_gradients)


def test_padded_tokens_change_nothing_elsewhere():
    layer = TransformerEncoderLayer(config_of()).eval()
    mask = padding_mask(3, 7)
    x = torch.randn(7, 3, HIDDEN)
    layer(x, mask)
    other = torch.where(mask.t()[..., None], torch.randn_like(x), x)
    with torch.no_grad():
        difference = (layer(x, mask) - layer(other, mask)).abs().amax(dim=2).t()
    assert difference.max() == 0
    with torch.no_grad():
        assert not layer(x, mask)[mask.t()].any()


def zeroed(y, padding):
    """y [T, B, H] with zeros where there is padding."""
    return y if padding is None else y.masked_fill(padding.t()[..., None], 0.0)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_float_mode_equals_fairseq(pre_norm, activation):
    mask = padding_mask(3, 7)
    for padding in (None, mask):
        compare_with_fairseq(
            TransformerEncoderLayer(
                config_of(mode="float", pre_norm=pre_norm, activation=activation)
            ),
            fairseq_layer("encoder", pre_norm=pre_norm, activation=activation),
            lambda layer, x, padding=padding: layer(x, padding),
            lambda layer, x, padding=padding: zeroed(layer(x, padding), padding),
            lambda: (torch.randn(7, 3, HIDDEN),),
        )


@pytest.mark.parametrize("mode", ["float", "int8"])
def test_nan_in_the_input_reaches_the_output(mode):
    layer = TransformerEncoderLayer(config_of(mode=mode))
    layer(torch.randn(7, 3, HIDDEN))
    x = torch.randn(7, 3, HIDDEN)
    x[4, 1, 5] = float("nan")
    assert layer(x)[:, 1].isnan().all()


@pytest.mark.parametrize("mode", ["float", "int8"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinity_in_the_input_reaches_the_output(mode, value):
    """Its code is clipped, but the residual carries it."""
    layer = TransformerEncoderLayer(config_of(mode=mode))
    layer(torch.randn(7, 3, HIDDEN))
    x = torch.randn(7, 3, HIDDEN)
    x[4, 1, 5] = value
    assert not layer(x)[4, 1].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_overflow_in_the_gradient_reaches_the_gradients(value, backward, mode):
    layer = TransformerEncoderLayer(config_of(mode=mode, backward=backward))
    x = torch.randn(7, 3, HIDDEN, requires_grad=True)
    output = layer(x)
    upstream = torch.randn_like(output)
    upstream[2, 1, 3] = value
    found = torch.autograd.grad(output, [x, *layer.parameters()], upstream)
    named = dict(zip(["x", *dict(layer.named_parameters())], found, strict=True))
    for name in ("x", "self_attn.qkv_weight", "feed_forward.fc1_weight", "final_layer_norm.bias"):
        assert not named[name].isfinite().all(), name


@pytest.mark.parametrize("pre_norm", [False, True])
def test_int8_gradients_are_unbiased(pre_norm):
    x = torch.randn(5, 3, HIDDEN, requires_grad=True)
    exact, rounded = (
        TransformerEncoderLayer(
            config_of(backward=backward, pre_norm=pre_norm, activation="gelu", calibration_passes=0)
        )
        for backward in ("float", "int8")
    )
    prepare(exact, lambda layer, x: layer(x), (x,))
    rounded.load_state_dict(exact.state_dict())
    drawn = [gradients(rounded, rounded(x), x) for _ in range(200)]
    untouched = ("feed_forward.fc2_bias", "final_layer_norm.weight", "final_layer_norm.bias")
    assert_unbiased(
        gradients(exact, exact(x), x), drawn, exempt=untouched if not pre_norm else untouched[:1]
    )


def test_int8_gradients_have_little_noise():
    x = torch.randn(13, 5, HIDDEN, requires_grad=True)
    found = []
    for backward in ("float", "int8"):
        torch.manual_seed(3)
        layer = TransformerEncoderLayer(config_of(backward=backward))
        found.append(gradients(layer, layer(x), x))
    exact, rounded = found
    for name in (
        "input 0",
        "self_attn.qkv_weight",
        "self_attn.out_weight",
        "feed_forward.fc1_weight",
    ):
        assert decibels(exact[name], rounded[name]) > 32, name


def test_backward_twice():
    layer = TransformerEncoderLayer(config_of(dropout=0.2, backward="int8"))
    x = torch.randn(5, 3, HIDDEN, requires_grad=True)
    total = layer(x).square().sum()
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(map(torch.equal, first, second))


def test_frozen_parameters_get_no_gradient():
    layer = TransformerEncoderLayer(config_of())
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.endswith("_clip"))
    layer(torch.randn(5, 3, HIDDEN)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == name.endswith("_clip"), name


def test_wrong_shapes_are_named():
    layer = TransformerEncoderLayer(config_of())
    with pytest.raises(ValueError, match=r"mask is \(7, 3\).*\(3, 7\)"):
        layer(torch.randn(7, 3, HIDDEN), torch.ones(7, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"64.*48"):
        layer(torch.randn(7, 3, 64))
    with pytest.raises(ValueError, match="x is torch.float64"):
        layer(torch.randn(7, 3, HIDDEN, dtype=torch.float64))
