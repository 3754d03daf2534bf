"""Configurations are checked when they are made; errors name the value and what is allowed."""

import dataclasses
import re

import pytest

from lsq.config import (
    LayerConfig,
    QuantConfig,
    RelativeBias,
    Rotary,
    check_dimension,
    documentation,
)
from lsq.config.quantization import CONSTANT, of_this_version

LAYER = {"hidden": 48, "heads": 3, "feed_forward": 112}
NARROW = "int8 of 4 bits"


def test_defaults():
    config = QuantConfig()
    assert config.quantized and config.bits == 8
    assert (config.clip_init, config.weight_granularity) == ("mse", "channel")
    assert (config.clip_gradient, config.backward) == ("pact", "int8")
    assert LayerConfig(**LAYER).quant == config
    assert not QuantConfig(mode="float").quantized


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "in int8"),
        ({"mode": "float"}, "in floats"),
        ({"backward": "float"}, "with weights in int8, activations in int8, gradients in floats"),
        ({"bits": 4}, f"with weights in {NARROW}, activations in {NARROW}, gradients in int8"),
        ({"weight_format": "int4"}, "with weights in int4, activations in int8, gradients in int8"),
        (
            {"bits": 6, "weight_format": "int8,*fc2*=nvfp4,*fc1*=int8"},
            "with weights in int8 of 6 bits,*fc2*=nvfp4,*fc1*=int8 of 6 bits, activations in int8"
            " of 6 bits, gradients in int8",
        ),
    ],
)
def test_summary(given, said):
    assert QuantConfig(**given).summary == said


def refuses(make, name: str, value, allowed: str) -> None:
    message = re.escape(f"{name} is {value!r}") + ".*" + re.escape(allowed)
    with pytest.raises(ValueError, match=message):
        make(**{name: value})


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("mode", "int4", "'float', 'int8'"),
        ("clips", "largest", "'auto', 'absmax', 'learned'"),
        ("clip_init", "max", "'fixed', 'absmax', 'percentile', 'mse'"),
        ("weight_granularity", "row", "'tensor', 'channel'"),
        ("clip_gradient", "ste", "'pact', 'lsq'"),
        ("backward", "int4", "'float', 'int8'"),
        *(("bits", bits, "from 2 to 8") for bits in (1, 9, 8.0)),
        ("sparsity", "1:4", "'2:4'"),
    ],
)
def test_quantisers_refuse(name, value, allowed):
    refuses(QuantConfig, name, value, allowed)


def test_what_is_of_learned_clips_alone():
    assert QuantConfig().clips == "auto" and not QuantConfig().learned
    assert QuantConfig(bits=4).learned
    for name, value in {
        "weight_format": "int4",
        "clip_gradient": "lsq",
        "clip_init": "absmax",
    }.items():
        assert QuantConfig(**{name: value}).learned
        with pytest.raises(ValueError, match=f'{name} is .*but clips is "absmax"'):
            QuantConfig(clips="absmax", **{name: value})
    for weights in ("ternary/tensor", "int2/row", "ternary/row/float32,*head*=int8"):
        assert not QuantConfig(weight_format=weights).learned
    for weights in ("int3/row", "ternary/group64", "ternary/tensor,*head*=int4"):
        assert QuantConfig(weight_format=weights).learned
        with pytest.raises(ValueError, match="which is for int8 and ternary weights, and"):
            QuantConfig(weight_format=weights, clips="absmax")
    with pytest.raises(ValueError, match="activation_format is 'ternary/row', but clips is"):
        QuantConfig(activation_format="ternary/row", clips="absmax")


@pytest.mark.parametrize(
    "given, fields",
    [
        ({"backward_dtype": "float32", "backward": "float"}, {"backward": "float"}),
        ({"activation_init": "absmax"}, {"clip_init": "absmax"}),
        ({"weight_init": "fixed", "activation_init": "fixed"}, {"clip_init": "fixed"}),
        (CONSTANT, {}),
    ],
)
def test_fields_of_version_0_1(given, fields):
    assert of_this_version(fields) == fields
    with pytest.warns(FutureWarning, match=" now"):
        assert of_this_version(given) == fields
    with pytest.warns(FutureWarning, match="weight_init is clip_init now"):
        assert QuantConfig(weight_init="absmax").learned


@pytest.mark.parametrize(
    "given, message",
    [
        *(({name: 7}, f"{name} is 7, but it is always .* now: leave it out") for name in CONSTANT),
        ({"weight_init": "mse", "activation_init": "fixed"}, "are clip_init now.*give clip_init"),
        ({"weight_init": "mse", "clip_init": "fixed"}, "weight_init is clip_init now"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fields_of_version_0_1_that_would_be_lost(given, message):
    with pytest.raises(ValueError, match=message):
        of_this_version(given)


@pytest.mark.parametrize(
    "config, before, value, now",
    [
        (LayerConfig, "key_heads", 1, "kv_heads"),
        (LayerConfig, "score_factor", 0.5, "softmax_scale"),
        (LayerConfig, "head_norm", 1e-6, "qk_norm"),
        (LayerConfig, "by_inputs", True, "in_out"),
        (Rotary, "places", 7, "positions"),
    ],
)
def test_names_of_version_0_1(config, before, value, now):
    others = LAYER | {"rotary": Rotary(positions=7)} if config is LayerConfig else {}
    with pytest.warns(FutureWarning, match=f"{before} is {now} now"):
        assert config(**others, **{before: value}) == config(**others, **{now: value})
    with pytest.raises(ValueError, match=f"{before} and {now} are given.*give {now} alone"):
        config(**others, **{before: value, now: value})


WHOLE, SHARE = "whole number above 0", "at least 0 and below 1"


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        *((name, 0, WHOLE) for name in ("hidden", "kv_heads", "window")),
        ("heads", -1, WHOLE),
        ("heads", True, WHOLE),
        ("feed_forward", 112.0, WHOLE),
        ("head_width", 8.0, WHOLE),
        ("dropout", 1.0, SHARE),
        ("attention_dropout", -0.1, SHARE),
        ("activation_dropout", float("nan"), SHARE),
        ("activation", "swish", "'relu', 'gelu', 'gelu_tanh', 'silu', 'squared_relu'"),
        ("norm", "batch", "'layer', 'rms'"),
        ("layer_norm_epsilon", 0.0, "above 0"),
        ("qk_norm", 1e-6, "give `rotary`"),
        ("softmax_scale", 0.0, "above 0"),
    ],
)
def test_layers_refuse(name, value, allowed):
    refuses(lambda **given: LayerConfig(**LAYER | given), name, value, allowed)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"heads": 5}, "hidden size 48 is not divisible by 5 heads"),
        ({"kv_heads": 2}, "3 heads are not divisible by 2 kv_heads"),
        ({"head_width": 20}, "the width of all heads of queries is 60.*use 64"),
        ({"hidden": 51}, "hidden is 51.*multiple of 16; use 64"),
        ({"feed_forward": 100}, "feed_forward is 100.*multiple of 16; use 112"),
    ],
)
def test_widths_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        LayerConfig(**LAYER | given)
    if not any("head" in name for name in given):
        LayerConfig(**LAYER | given, quant=QuantConfig(mode="float"))


def test_widths_of_attention():
    config = LayerConfig(hidden=64, heads=8, kv_heads=2, head_width=20, feed_forward=64)
    widths = (config.of_keys, config.head_columns, config.query_columns, config.key_columns)
    assert widths == (2, 20, 160, 40)
    assert LayerConfig(**LAYER).query_columns == LayerConfig(**LAYER).key_columns == 48


@pytest.mark.parametrize("given", [{"buckets": 30}, {"farthest": 16}])
def test_biases_refuse(given):
    message = "buckets is .* and farthest .*; buckets must be a multiple of 4"
    with pytest.raises(ValueError, match=message):
        RelativeBias(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"positions": 0}, "positions is 0; it must be a whole number above 0"),
        ({"base": -1.0}, "base is -1.0.*above 0"),
        ({"width": 3}, "width is 3; it must be an even number above 0, or None"),
        ({"width": 18}, "18 columns of a head cannot turn; give an even number up to .* 16"),
    ],
)
def test_rotary_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        LayerConfig(**LAYER, rotary=Rotary(**{"positions": 64} | given))


@pytest.mark.parametrize("value, use", [(1, 16), (15, 16), (17, 32), (8191, 8192)])
def test_the_next_width_is_named(value, use):
    check_dimension("width", use)
    with pytest.raises(ValueError, match=f"width is {value}.*use {use}"):
        check_dimension("width", value)


def test_configurations_are_frozen_and_hashable():
    config = LayerConfig(**LAYER)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden = 64
    assert hash(config) == hash(LayerConfig(**LAYER))
    assert dataclasses.replace(config, heads=4).heads == 4
    with pytest.raises(ValueError):
        dataclasses.replace(config, heads=5)


def test_fields_are_named():
    with pytest.raises(TypeError):
        QuantConfig("float")
    with pytest.raises(TypeError, match="bit"):
        QuantConfig(bit=4)


def test_documentation_is_the_text_under_each_field():
    @dataclasses.dataclass
    class Example:
        """Not a field's."""

        first: int
        """About the
        first."""
        second: int = 0
        third: int = 0
        "About the third."

    assert documentation(Example) == {
        "first": "About the\nfirst.",
        "second": "",
        "third": "About the third.",
    }


def test_formats_in_a_file(tmp_path):
    path = tmp_path / "weight_format.txt"
    path.write_text("int8,*fc2*=int4\n")
    quant = QuantConfig(weight_format=f"@{path}")
    assert quant == QuantConfig(weight_format="int8,*fc2*=int4")
    assert dataclasses.replace(quant, bits=7).weight_format == "int8,*fc2*=int4"
    with pytest.raises(ValueError, match="weight_format is '@.*nothing', a file of formats such"):
        QuantConfig(weight_format=f"@{tmp_path / 'nothing'}")
    path.write_text("int3")
    with pytest.raises(ValueError, match="does not say which values share a scale"):
        QuantConfig(weight_format=f"@{path}")
