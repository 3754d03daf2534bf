"""What clips in a state dict mean, and that a model of another format refuses them."""

import json

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import FeedForward, QuantizedLinear, TransformerEncoderLayer, clip_format
from lsq.quant.declared import declare
from lsq.quant.numbers import BUILT_IN, NUMBER_FORMATS, find_number, scaled_format
from tests.layers.shapes import config_of


def layer(**options) -> QuantizedLinear:
    made = QuantizedLinear(32, 16, quant=QuantConfig(**options))
    made(torch.randn(3, 32)).sum().backward()
    return made


def test_a_state_says_the_format_and_goes_on_in_it():
    """Also by other names of it."""
    state = layer(weight_format="int4", bits=6).state_dict()
    assert clip_format.read(state["format"], "format") == {
        "weight_format": "int4",
        "activation_format": "int8",
        "weight_granularity": "channel",
        "bits": 6,
    }
    layer(weight_format="int4", bits=6).load_state_dict(state)
    assert "format" not in layer(mode="float").state_dict()
    short = {"weight_format": "int8-row,a=mxfp4", "activation_format": "int8/tensor/float32"}
    whole = {
        "weight_format": "int8/row,a=fp4-e2m1/group32/e8m0",
        "activation_format": "int8-tensor",
    }
    layer(**whole).load_state_dict(layer(**short).state_dict())


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (
            {"weight_format": "int4"},
            {},
            "with weight_format='int4', but .* has weight_format='int8'",
        ),
        ({}, {"bits": 4}, r"keep QuantConfig\(bits=8\), in fairseq --lsq-bits 8, or .*R --bits 4$"),
        (
            {"weight_granularity": "tensor", "bits": 5},
            {},
            "trained with bits=5, weight_granularity='tensor', but",
        ),
        (
            {"weight_format": "int8-row,a=mxfp4"},
            {"weight_format": "int8/row,b=mxfp4"},
            "weight_format='int8-row,a=mxfp4', but this model has weight_format='int8/r",
        ),
    ],
)
def test_another_format_is_refused_with_both_names(theirs, ours, said):
    model = layer(**ours)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=said):
        model.load_state_dict(layer(**theirs).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_part_of_a_model_is_named():
    model = torch.nn.Sequential(layer(), layer(bits=4))
    state = torch.nn.Sequential(layer(), layer()).state_dict()
    with pytest.raises(ValueError, match=r"the checkpoint \(1\.\*\) was trained with bits=8"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"weight_format": "nvfp4"}, "with weight_format='int8', but .* has weight_format='nvfp4'"),
        ({"weight_format": "int8,*=mxint8"}, "with weight_format='int8', but .* has .*mxint8"),
        ({"activation_format": "fp8-e4m3/tensor"}, "with activation_format='int8', but"),
        ({"weight_format": "float32"}, "with weight_format='int8', but"),
    ],
)
def test_earlier_versions_had_integers_alone(ours, said):
    state = layer().state_dict()
    del state["format"]
    with pytest.raises(ValueError, match=said):
        layer(**ours).load_state_dict(state)
    layer(weight_format="int4").load_state_dict(state)
    layer(bits=4).load_state_dict(state)
    weights = {name: state[name] for name in ("weight", "bias")}
    layer(**ours).load_state_dict(weights, strict=False)


def test_of_later_versions_more_is_refused_unless_it_is_known():
    text = b'{"weight_format": "int8", "turns": 3}'
    state = layer().state_dict() | {"format": torch.tensor(list(text), dtype=torch.uint8)}
    with pytest.raises(ValueError, match="was trained with turns=3, but this model has turns=None"):
        layer().load_state_dict(state)


@pytest.mark.parametrize("stored", [torch.tensor(one) for one in ([1, 2], list(b"[1]"), 0.5, [-3])])
def test_a_damaged_one_is_named(stored):
    with pytest.raises(ValueError, match="format is no format of clips .* load a sound checkpoint"):
        layer().load_state_dict(layer().state_dict() | {"format": stored})


@pytest.mark.parametrize("build", [TransformerEncoderLayer, FeedForward])
def test_a_checkpoint_of_an_older_version_is_measured_again(build, caplog):
    """Products were rounded before their bias, and blocks counted for themselves."""
    layer = build(config_of())
    prefix = "feed_forward." if build is TransformerEncoderLayer else ""
    state = layer.state_dict() | {
        "calibrated": torch.tensor(True),
        prefix + "hidden_clip": torch.ones(1),
    }
    if prefix:
        state |= {
            "feed_forward.calibrated": torch.tensor(True),
            "feed_forward.passes": torch.tensor(3),
        }
    clip_format._warn.cache_clear()
    for _ in range(2):
        layer.load_state_dict(state)
        assert not layer.schedule.calibrated and caplog.text.count("of an older version") == 1
    layer.load_state_dict(layer.state_dict() | {"calibrated": torch.tensor(True)})
    assert layer.schedule.calibrated


# Numbers that users declare


def forgotten(*names: str) -> None:
    """Undo a declaration, as in a process that never saw it."""
    for name in names:
        del NUMBER_FORMATS[name]
    find_number.cache_clear()
    scaled_format.cache_clear()


def test_a_state_declares_the_numbers_that_it_uses():
    """Of weights, activations and gradients, in the entry `format`; of nothing else."""
    for name in ("of_weights", "of_activations", "of_gradients", "unused"):
        declare(name, (-1, 0, 0.3))
    state = layer(
        weight_format="int8,weight=of_weights/row",
        activation_format="of_activations/tensor",
        gradient_format="of_gradients/row",
    ).state_dict()
    stored = json.loads(bytes(state["format"].int().tolist()))
    assert stored["numbers"] == dict.fromkeys(
        ("of_activations", "of_gradients", "of_weights"), [-1, 0, 0.3]
    )
    assert "numbers" not in clip_format.read(state["format"], "format")
    forgotten(*NUMBER_FORMATS.keys() - BUILT_IN)
    clip_format.read(state["format"], "format")
    assert NUMBER_FORMATS.keys() - BUILT_IN == stored["numbers"].keys()
    assert b"numbers" not in bytes(layer().state_dict()["format"].int().tolist())


def test_a_number_with_other_values_here_is_refused():
    declare("differs", (-1, 0, 1))
    model = layer(weight_format="differs/row")
    state = torch.nn.Sequential(model).state_dict()
    forgotten("differs")
    declare("differs", (-1, 0, 2))
    with pytest.raises(
        ValueError,
        match=r"^differs has 3 values here and 3 in the checkpoint \(0.format\), and value 2 is 2.0"
        " here and 1.0 there; rename one of the two$",
    ):
        torch.nn.Sequential(model).load_state_dict(state)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (3, "format is no format of clips"),
        ([[1, [0, 1]]], "format is no format of clips"),
        ({"x": 3}, "x gives 3; it must give its values"),
        ({"x": [0, float("nan")]}, "value 1 of x is nan"),
        ({"x": [[0], 1]}, r"value 0 of x is \[0\]"),
        ({"nf4": [0, 1]}, "nf4 is a name of lsq's own"),
        ({"a/b": [0, 1]}, "'a/b' is no name of a number format"),
    ],
)
def test_damaged_numbers_are_named(numbers, said):
    text = json.dumps({"weight_format": "int8", "numbers": numbers}).encode()
    state = layer().state_dict() | {"format": torch.tensor(list(text))}
    with pytest.raises(ValueError, match=f"^{said}"):
        layer().load_state_dict(state)
    assert NUMBER_FORMATS.keys() == BUILT_IN
