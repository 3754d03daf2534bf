"""Formats by patterns of names."""

import pytest

from lsq.config import QuantConfig
from lsq.quant.choices import FormatChoice, format_choice
from lsq.quant.numbers import scaled_format

TEXT = "int8,*fc2*=nvfp4, encoder.layers.0.* = float32"


def test_the_last_pattern_that_fits_counts():
    choice = format_choice(TEXT)
    assert choice == FormatChoice("int8", (("*fc2*", "nvfp4"), ("encoder.layers.0.*", "float32")))
    assert choice.of("encoder.layers.1.fc1_weight") == "int8"
    assert choice.of("encoder.layers.1.fc2_weight") == "nvfp4"
    assert choice.of("encoder.layers.0.fc2_weight") == "float32"
    assert choice.of("q", "fc2", "v") == "nvfp4"


def test_a_part_keeps_what_concerns_it():
    fitted = {}
    tensors = {"fc1_weight": ["fc1_weight"], "fc2_weight": ["fc2_weight"]}
    assert format_choice(TEXT).at("encoder.layers.1", tensors, fitted) == "int8,fc2_weight=nvfp4"
    assert fitted == {"*fc2*": {"nvfp4"}}
    assert format_choice(TEXT).at("encoder.layers.0", tensors, fitted) == "float32"
    assert format_choice(TEXT).at("", {"weight": ["weight"]}, fitted) == "int8"
    assert fitted == {"*fc2*": {"nvfp4", "float32"}, "encoder.layers.0.*": {"float32"}}


def test_layers_without_exceptions_are_configured_alike():
    quant = QuantConfig(weight_format=TEXT)
    names = {"weight": ["weight"]}, {"input": ["input"]}
    first, second = (quant.at(f"decoder.layers.{number}.fc1", *names) for number in range(2))
    assert first == second == QuantConfig() and first.coded
    assert quant.at("encoder.layers.0", *names).weight_form("weight") is None
    assert quant.at("decoder.fc2", *names).weight_form("weight") == scaled_format("nvfp4")


@pytest.mark.parametrize("text", ["int8,nvfp4", "*fc2*=nvfp4", "int8,a=b=c", "int8,=nvfp4"])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match="does not say which tensors have which format"):
        format_choice(text)


def test_formats_of_patterns_exist():
    with pytest.raises(ValueError, match="weight_format is 'int8,a=nvfp5': .*did you mean nvfp4"):
        QuantConfig(weight_format="int8,a=nvfp5")


def test_patterns_that_fit_nothing_are_named():
    with pytest.raises(
        ValueError, match="weight_format gives nvfp4 to '\\*fc2\\*', but no tensor .* a.fc1.weight"
    ):
        QuantConfig(weight_format=TEXT).check_fitted(
            {"weight_format": {"encoder.layers.0.*": {"float32"}}},
            {"weight_format": ["a.fc1.weight"]},
        )


def test_weights_of_one_tensor_have_one_format():
    names = (
        {"qkv": ["q", "k", "v"], "out": ["o"]},
        {"input": ["input", "q", "k", "v"], "context": ["context", "o"]},
    )
    assert (
        QuantConfig(weight_format="int8,*.[qkv]=int4").at("a", *names).weight_format
        == "int8,qkv=int4"
    )
    with pytest.raises(
        ValueError, match="weight_format gives int8 to a.q, int4 to a.k, int8 to a.v; .* one tensor"
    ):
        QuantConfig(weight_format="int8,*.k=int4").at("a", *names)
    with pytest.raises(
        ValueError, match="gradient_format gives int8 to a.q, int8 to a.k, mxint8 to a.v; "
    ):
        QuantConfig(gradient_format="int8,*.v=mxint8").at("a", *names)
    with pytest.raises(
        ValueError,
        match="activation_format gives nvfp4 to the input of a.q, int8 to the input of a.k",
    ):
        QuantConfig(activation_format="int8,*.q=nvfp4").at("a", *names)
    chosen = QuantConfig(activation_format="int8,*.q=nvfp4,*.input=mxint8,*.o=nvfp4").at(
        "a", *names
    )
    assert chosen.activation_format == "mxint8,context=nvfp4"


def test_patterns_that_decide_nothing_are_named():
    quant, fitted = QuantConfig(weight_format="int8,a.*=int4,*.q=int4,a.?=int8"), {}
    quant.at("a", {"q": ["q"]}, {}, fitted)
    with pytest.raises(
        ValueError, match="int4 to 'a.\\*', but later patterns give all that it fits int8, since"
    ):
        quant.check_fitted(fitted, {"weight_format": ["a.q"]})
    quant.at("a", {"out": ["out"]}, {}, fitted)
    with pytest.raises(ValueError, match="int4 to '\\*.q', but later patterns"):
        quant.check_fitted(fitted, {"weight_format": ["a.q", "a.out"]})
