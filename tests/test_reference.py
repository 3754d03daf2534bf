"""The int8 layers against lsq/reference.py, bit by bit."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.layers.schedule import WINDOW
from lsq.reference import Int8Linear, reference_linear
from lsq.run.backends import backend
from tests.constants import quant_with

QUANT = {
    "absmax": QuantConfig(),
    "learned": quant_with(clips="learned", calibration_passes=0),  # only the first pass measures
}
SUMS = {"bias", "input_clip", "weight_clip"}
"""Gradients that are sums of floats, which the CPU's loops add up in another order."""


def trained(layer):
    """The layer after a few steps: clips have followed or learned, some weights outgrew them."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(WINDOW + 1):  # later passes round under the clips of those before
        layer(torch.randn(9, layer.in_features)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer


def results(run, layer, x, upstream):
    """Output and gradients, by name, with the same random numbers each time."""
    x = x.clone().requires_grad_()
    leaves = {"x": x, **{name: one for name, one in layer.named_parameters() if one.requires_grad}}
    torch.manual_seed(5)
    y = run(x)
    gradients = torch.autograd.grad(y, list(leaves.values()), upstream)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def compare(layer, x, upstream):
    """Check a pass of the layer against the reference; returns what this finds."""
    learned, before = layer.quant.learned, layer.weight_clip.detach().clone()

    def reference(x):
        clips = layer.input_clip, layer.weight_clip if learned else before
        options = {"learned": learned, "training": layer.training}
        return reference_linear(x, layer.weight, layer.bias, *clips, **options)

    found = results(layer, layer, x, upstream)  # comes first, because it may measure clips
    wanted = results(reference, layer, x, upstream)
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        if name in SUMS and layer.target is backend("cpu"):
            most = expected.abs().max().item()
            torch.testing.assert_close(found[name], expected, rtol=0, atol=2**-18 * most, msg=name)
        else:
            assert torch.equal(found[name], expected), name
    return wanted


@pytest.mark.parametrize("place", ["cpu", "reference"])
@pytest.mark.parametrize("clips", QUANT)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "tokens, inputs, outputs",
    [(1, 16, 16), (3, 48, 32), (33, 80, 16), (47, 16, 208), (130, 272, 112)],
)
def test_the_layer_computes_the_reference(tokens, inputs, outputs, bias, clips, place):
    layer = QuantizedLinear(inputs, outputs, bias=bias, quant=QUANT[clips])
    layer.backend = backend(place)
    trained(layer).eval()
    x, upstream = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    x[0, 0], x[-1, -1] = 50.0, -70.0
    wanted = compare(layer, x, upstream)
    assert layer.input_clip < 50
    if clips == "learned":
        assert (wanted["x"] == 0)[x.abs() > layer.input_clip].all()
        assert wanted["input_clip"] != 0
        assert wanted["weight_clip"].any()
    layer.train()
    compare(layer, x, upstream)
    assert layer.input_clip < 50


@pytest.mark.parametrize("clips", QUANT)
@pytest.mark.parametrize("shape", [(5, 1, 80), (80,)])
def test_a_converted_layer_computes_the_reference(shape, clips):
    """From the first pass on, which measures the clips, and with any dimensions before the last."""
    model = nn.Sequential(nn.Linear(80, 64))
    lsq.convert(model, QUANT[clips])
    for _ in range(2):
        compare(model[0], torch.randn(shape), torch.randn(*shape[:-1], 64))
        trained(model[0])


def test_whole_numbers_and_halves():
    """Under clips of 127 whole numbers are their own codes, and the product has no error at all."""
    layer = QuantizedLinear(
        16, 16, bias=False, quant=quant_with(clip_init="fixed", activation_clip=127.0)
    )
    halves = torch.arange(-128.0, 128.0, 0.5).view(
        2, 16, 16
    )  # the even one is nearest; 127 is not clipped
    with torch.no_grad():
        layer.weight.copy_(halves.flip(2).view(-1, 16)[::2])
        layer.weight_clip.fill_(127.0)
    x = halves.view(-1, 16)
    wanted = compare(layer, x, torch.randn(32, 16))
    assert layer.input_clip == 127 and (layer.weight_clip == 127).all()
    assert torch.equal(wanted["x"] == 0, x.abs() > 127)
    x, weight = x.round().clamp(-127, 127), layer.weight.round().clamp(-127, 127)
    assert torch.equal(wanted["y"], x @ weight.t())


def test_zeros():
    """Padding has no gradient, a pruned output no weight, a dead input no value."""
    layer = QuantizedLinear(48, 32)
    with torch.no_grad():
        layer.weight[3] = 0.0
    x, upstream = torch.randn(7, 48), torch.randn(7, 32)
    x[:, 5], upstream[2] = 0.0, 0.0
    wanted = compare(layer, x, upstream)
    assert (
        not wanted["x"][2].any() and not wanted["weight"][:, 5].any() and wanted["weight"][3].any()
    )


def test_the_page_shows_the_code():
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    assert inspect.getsource(Int8Linear) in page.read_text(encoding="utf-8")
