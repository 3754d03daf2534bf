"""Architecture: written and read again, and what is refused."""

import json
from dataclasses import replace

import pytest

from lsq.config import Rotary
from lsq.config.quantization import CONSTANT
from lsq.serving.architecture import Architecture
from lsq.serving.decoding_model import model_of
from tests.serving.models import small_model


def written(**options) -> dict:
    return json.loads(model_of(small_model(**options)).architecture.to_json())


@pytest.mark.parametrize(
    "options", [{}, {"encoder_layers": 0, "tied": False}, {"shared": False, "pre_norm": True}]
)
def test_what_is_written_is_read(options):
    found = model_of(small_model(**options)).architecture
    assert Architecture.from_json(found.to_json()) == found


def test_layers_of_before_gates_and_without_bias_are_read():
    whole, older = written(), written()
    for name in ("gated", "bias"):
        del older["decoder"]["config"][name]
    first, second = (Architecture.from_json(json.dumps(one)) for one in (whole, older))
    assert first == second


def of_version_0_1(quant: dict, **changes) -> dict:
    fields = {name: value for name, value in quant.items() if name != "clip_init"}
    return fields | CONSTANT | {"weight_init": "mse", "activation_init": "mse"} | changes


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("changes", [{}, {"clip_step": 0.01}, {"activation_init": "absmax"}])
def test_formats_of_version_0_1_are_read(changes):
    whole = written()
    found = Architecture.from_json(json.dumps(whole))
    for side in ("encoder", "decoder"):
        config = whole[side]["config"]
        config["quant"] = of_version_0_1(config["quant"], **changes)
    read = Architecture.from_json(json.dumps(whole))
    if changes:  # these were of clips that learn
        assert read.decoder.config.quant.learned
    else:
        assert read == found


@pytest.mark.parametrize(
    "changes, said", [({"weight_init": [1]}, "clip_init is"), ({"other": 1}, "has unknown other")]
)
def test_damaged_formats_of_version_0_1_are_refused(changes, said):
    whole = written()
    config = whole["decoder"]["config"]
    config["quant"] = of_version_0_1(config["quant"], activation_init=[1], **changes)
    with pytest.raises(ValueError, match=said):
        Architecture.from_json(json.dumps(whole))


def test_how_a_model_goes_on_learning_is_left_out():
    whole = model_of(small_model(quant={"sparsity": "2:4"})).architecture
    assert "sparsity" not in whole.to_json() and whole == model_of(small_model()).architecture


@pytest.mark.parametrize(
    "change, said",
    [
        ({"eos": "2"}, "architecture.eos is '2'"),
        ({"extra": 1}, "has unknown extra"),
        ({"eos": ...}, "lacks eos"),
        ({"decoder": None}, "architecture.decoder is None"),
        ({"encoder": 3}, "must be an object"),
        ({"encoder": {"layers": 0}}, "layers is 0"),
        ({"encoder": {"layers": 1025}}, "layers is 1025; .* from 1 to 1024"),
        ({"encoder": {"positions": "round"}}, "positions is 'round'"),
    ],
)
def test_what_cannot_be_is_refused(change, said):
    whole = written()
    for name, value in change.items():
        whole[name] = whole[name] | value if isinstance(value, dict) else value
    whole = {name: value for name, value in whole.items() if value is not ...}
    with pytest.raises(ValueError, match=said):
        Architecture.from_json(json.dumps(whole))
    with pytest.raises(ValueError, match="no JSON"):
        Architecture.from_json("{")


@pytest.mark.parametrize(
    "change", [{"head_width": 32}, {"window": 3}, {"rotary": Rotary(positions=8)}]
)
def test_attention_that_no_decoder_of_codes_knows_is_refused(change):
    decoder = model_of(small_model()).architecture.decoder
    (name,) = change
    with pytest.raises(
        ValueError,
        match=f"{name} is .*; models that are kept as codes decode without: leave it out",
    ):
        replace(decoder, config=replace(decoder.config, **change))
