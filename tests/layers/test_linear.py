"""QuantizedLinear against the float64 reference, and its int8 backward pass."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from tests.constants import quant_with
from tests.layers.oracle import compare_with_reference, only, prepare
from tests.layers.shapes import assert_unbiased, decibels, gradients

INPUTS, OUTPUTS = 48, 32


def check(*, bias=True, **options):
    quant = quant_with(backward="float", calibration_passes=0, **options)

    def reference(layer, x):
        weight = layer.round(layer.parameters["weight"], "weight_clip")
        return torch.nn.functional.linear(
            layer.round(x, "input_clip"), weight, layer.parameters.get("bias")
        )

    return compare_with_reference(
        QuantizedLinear(INPUTS, OUTPUTS, bias=bias, quant=quant),
        only(quant),
        lambda layer, x: layer(x),
        reference,
        lambda: (torch.randn(7, 3, INPUTS),),
    )


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_reference(clip_gradient, granularity, bits, bias):
    options = {"clip_gradient": clip_gradient, "weight_granularity": granularity, "bits": bits}
    check(bias=bias, **options)


def test_float_mode_is_torch_linear():
    layer = QuantizedLinear(7, 5, quant=QuantConfig(mode="float"))
    theirs = torch.nn.Linear(7, 5)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, requires_grad=True)
    torch.testing.assert_close(layer(x), theirs(x), atol=1e-6, rtol=1e-5)
    found, expected = gradients(layer, layer(x), x), gradients(theirs, theirs(x), x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_nan_in_a_weight_poisons_its_channel_alone():
    layer = QuantizedLinear(16, 16)
    x = torch.randn(5, 16)
    layer(x)
    with torch.no_grad():
        layer.weight[3, 2] = float("nan")
    assert torch.equal(layer(x).isnan(), (torch.arange(16) == 3).expand(5, 16))


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_nan_in_the_gradient_reaches_the_gradients(backward):
    layer = QuantizedLinear(16, 16, quant=quant_with(backward=backward, calibration_passes=0))
    x = torch.randn(5, 16, requires_grad=True)
    y = layer(x)
    upstream = torch.randn_like(y)
    upstream[2, 7] = float("nan")
    dx, dweight, dbias = torch.autograd.grad(y, [x, layer.weight, layer.bias], upstream)
    assert dx[2].isnan().any() and dx[[0, 1, 3, 4]].isfinite().all()
    assert dweight[7].isnan().any()
    assert dbias.isnan().sum() == 1


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
def test_int8_gradients_are_unbiased(clip_gradient):
    x = torch.randn(13, INPUTS, requires_grad=True)
    exact, rounded = (
        QuantizedLinear(
            INPUTS,
            OUTPUTS,
            quant=quant_with(backward=backward, clip_gradient=clip_gradient, calibration_passes=0),
        )
        for backward in ("float", "int8")
    )
    prepare(exact, lambda layer, x: layer(x), (x,))
    rounded.load_state_dict(exact.state_dict())
    drawn = [gradients(rounded, rounded(x), x) for _ in range(200)]
    assert_unbiased(gradients(exact, exact(x), x), drawn, exempt=("bias",))


def test_a_channel_of_zeros_learns_as_the_others_do():
    layer = QuantizedLinear(INPUTS, OUTPUTS, quant=QuantConfig())
    with torch.no_grad():
        layer.weight[3] = 0.0
    layer.calibrate_weights()
    x, gradient = torch.randn(64, INPUTS), torch.randn(64, OUTPUTS)
    layer(x).backward(gradient)
    assert decibels(gradient[:, 3] @ x, layer.weight.grad[3]) > 25


def test_int8_gradients_have_little_noise():
    """127 codes for about three standard deviations leave a noise of 1 %, or 40 dB."""
    found = []
    for backward in ("float", "int8"):
        torch.manual_seed(3)
        layer = QuantizedLinear(INPUTS, OUTPUTS, quant=QuantConfig(backward=backward))
        x = torch.randn(341, INPUTS, requires_grad=True)
        found.append(gradients(layer, layer(x), x))
    exact, rounded = found
    for name, least in {"input 0": 38.0, "weight": 35.0, "bias": 120.0}.items():
        assert decibels(exact[name], rounded[name]) > least, name


def test_widths_that_int8_cannot_take_are_refused():
    for call, named in (
        (lambda: QuantizedLinear(40, 32), "inputs is 40.*use 48"),
        (lambda: QuantizedLinear(48, 33), "outputs is 33.*48"),
        (lambda: QuantizedLinear(48, 32)(torch.randn(5, 96)), "96.*48"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
