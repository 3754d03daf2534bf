"""QuantizedLinear against the float64 reference, and its int8 backward pass."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.optim import Adam
from lsq.run.backends import backend
from tests.constants import quant_with
from tests.layers.oracle import compare_with_reference, only, prepare
from tests.layers.shapes import assert_unbiased, decibels, gradients
from tests.sampling import first

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


class BitLinear(torch.autograd.Function):
    """BitNet b1.58 (Ma et al. 2024): W / mean |W| to -1, 0 and 1, and the gradient of a float
    layer's product with the rounded operands."""

    @staticmethod
    def forward(ctx, x, weight, scale, step):
        x = (x / step).round().clamp(-127, 127) * step
        weight = (weight / scale).round().clamp(-1, 1) * scale
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, None, None


@pytest.mark.parametrize("grain", ["tensor", "row"])
@pytest.mark.parametrize("place", ["cpu", "reference", "emulated"])
def test_ternary_weights_follow_their_mean_magnitudes(place, grain):
    quant = QuantConfig(weight_format="ternary/" + grain, backward="float")
    layer = QuantizedLinear(INPUTS, OUTPUTS, bias=False, quant=quant)
    layer.backend = backend(place)
    optimizer = Adam(layer.parameters(), lr=0.05)
    for _ in range(3):
        x = torch.randn(21, INPUTS, requires_grad=True)
        y = layer(x)
        weight = layer.weight.detach().clone().requires_grad_()
        scale = weight.detach().abs().mean(*((1, True) if grain == "row" else ()))
        assert (weight.abs() > 1.5 * scale).any()  # the gradient passes there, too
        wanted = BitLinear.apply(x, weight, scale, layer.input_clip / 127)
        torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)
        upstream = torch.randn_like(y)
        (y * upstream).sum().backward()
        (slope,) = torch.autograd.grad(wanted, weight, upstream)
        torch.testing.assert_close(layer.weight.grad, slope, atol=1e-5, rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("backward", first(["int8", "float"], 1))
def test_ternary_layers_learn_alike_on_every_backend(backward):
    found = {}
    for place in ("cpu", "reference", "emulated"):
        torch.manual_seed(4)
        quant = QuantConfig(weight_format="ternary/tensor", backward=backward)
        net = torch.nn.Sequential(
            QuantizedLinear(INPUTS, 64, quant=quant),
            torch.nn.ReLU(),
            QuantizedLinear(64, OUTPUTS, quant=quant),
        )
        for layer in net[::2]:
            layer.backend = backend(place)
        optimizer, losses = Adam(net.parameters(), lr=0.01), []
        x, target = torch.randn(64, INPUTS), torch.randn(64, OUTPUTS)
        for _ in range(12):
            loss = (net(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[place] = losses
    assert found["cpu"][-1] < 0.9 * found["cpu"][0]
    for losses in found.values():
        assert losses == pytest.approx(found["cpu"], rel=0.02)


def test_widths_that_int8_cannot_take_are_refused():
    for call, named in (
        (lambda: QuantizedLinear(40, 32), "inputs is 40.*use 48"),
        (lambda: QuantizedLinear(48, 33), "outputs is 33.*48"),
        (lambda: QuantizedLinear(48, 32)(torch.randn(5, 96)), "96.*48"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
