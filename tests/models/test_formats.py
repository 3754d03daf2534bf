"""lsq.convert with formats by patterns of names."""

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.quant.numbers import scaled_format
from tests.layers.shapes import decibels
from tests.models.models import Conv1D


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"fc1": nn.Linear(64, 128), "fc2": nn.Linear(128, 64), "out": nn.Linear(64, 64)}
    )


def test_patterns_choose_formats_of_layers():
    found = model()
    quant = QuantConfig(
        weight_format="int8,*fc2*=nvfp4,out.*=float32", activation_format="int8,out.*=float32"
    )
    report = lsq.convert(found, quant)
    assert str(report).startswith(
        "3 of 3 linear layers run with weights in int8,*fc2*=nvfp4,out.*=float32, activation"
    )
    fc1, fc2, out = found.values()
    assert fc1.quant == QuantConfig() and not fc2.quant.coded
    assert fc2.quant.weight_format == "nvfp4" and hasattr(fc2, "weight_clip")
    assert not any("clip" in name for name, _ in out.named_parameters())
    x = torch.randn(5, 64, requires_grad=True)
    out(fc2(fc1(x).relu())).square().sum().backward()
    assert all(
        parameter.grad is not None for parameter in found.parameters() if parameter.requires_grad
    )
    plain = model()["out"]
    torch.testing.assert_close(out(x), plain(x))  # nothing is rounded there


def test_what_a_layer_reads_is_called_as_its_weight_too():
    found = model()
    lsq.convert(
        found,
        QuantConfig(activation_format="int8,*.weight=float32,*fc2*=nvfp4,*out.input=log4.3/tensor"),
    )
    formats = [layer.quant.activation_form("input") for layer in found.values()]
    assert formats == [None, scaled_format("nvfp4"), scaled_format("log4.3/tensor")]


def test_a_pattern_that_fits_nothing_leaves_the_model_as_it_was():
    found = model()
    with pytest.raises(
        ValueError, match="weight_format gives nvfp4 to '\\*fc3\\*'.* nearest are fc2.weight, "
    ):
        lsq.convert(found, QuantConfig(weight_format="int8,*fc3*=nvfp4"))
    assert all(type(module) is nn.Linear for module in found.values())


@pytest.mark.parametrize("pattern, float_name", [("fc?.bias", "fc1.bias"), ("*out*", "out.weight")])
def test_what_stays_a_float_is_named(pattern, float_name):
    found = model()
    with pytest.raises(
        ValueError, match=f"gives nvfp4 to .*, but {float_name} stays a float here; nearest are fc"
    ):
        lsq.convert(found, QuantConfig(weight_format=f"int8,{pattern}=nvfp4"), skip="out")
    assert all(type(module) is nn.Linear for module in found.values())


def test_layers_that_share_a_weight_have_their_own_formats():
    found = model()
    found["twin"] = nn.Linear(64, 64)
    found["twin"].weight = found["out"].weight
    lsq.convert(found, QuantConfig(weight_format="int8,twin.weight=int4"))
    x = torch.randn(7, 64)
    expected = nn.functional.linear(x, found["out"].weight)
    for _ in range(2):
        first, second = found["out"](x) - found["out"].bias, found["twin"](x) - found["twin"].bias
        (first.sum() + second.sum()).backward()
        assert 35 < decibels(expected, first) and 15 < decibels(expected, second) < 30


def test_formats_that_begin_like_int4_take_what_int4_does_not():
    """Weights [inputs, outputs], which packed codes do not store."""
    found = nn.Sequential(Conv1D(64, 64))
    with pytest.raises(ValueError, match="which int4 does not store"):
        lsq.convert(found, QuantConfig(weight_format="int4"))
    report = lsq.convert(found, QuantConfig(weight_format="int4/row"))
    assert not any(layer.reason for layer in report.layers) and found[0].weight_clip.shape == (64,)
