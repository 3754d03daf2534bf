"""Names of what is rounded: its own, and those of the weights that read it."""

import pytest

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import ALONE
from lsq.layers.programs import Mode
from lsq.layers.tensor_names import tensor_names
from lsq.run.backends import backend

MODE = Mode(training=True, backward=True, backend=backend("reference"))
ONE = PackedSequences(rows=1, count=1)


def names_of(program):
    return tensor_names(program, lambda name: [name])


@pytest.mark.parametrize("form", ["int8", "nvfp4", "float32"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_activations_are_called_as_the_weights_that_read_them_too(form, pre_norm):
    quant = QuantConfig(weight_format=form, activation_format=form)
    config = LayerConfig(
        hidden=32, heads=2, feed_forward=48, gated=True, pre_norm=pre_norm, quant=quant
    )
    weights, activations = names_of(programs.decoder_layer(config, ONE, ONE, MODE))
    assert list(activations.values()) == [
        ["self_attn.input", "self_attn.qkv_weight"],
        ["self_attn.qkv"],
        ["self_attn.context", "self_attn.out_weight"],
        ["encoder_attn.input", "encoder_attn.query_weight"],
        ["encoder_attn.memory", "encoder_attn.key_value_weight"],
        ["encoder_attn.key_value"],
        ["encoder_attn.query"],
        ["encoder_attn.context", "encoder_attn.out_weight"],
        ["feed_forward.input", "feed_forward.gate_weight", "feed_forward.up_weight"],
        ["feed_forward.gate"],
        ["feed_forward.up"],
        ["feed_forward.activation", "feed_forward.fc2_weight"],
    ]
    assert {name for _, *read in activations.values() for name in read} == weights.keys()


@pytest.mark.parametrize("form", ["int8", "nvfp4"])
def test_of_one_product(form):
    quant = QuantConfig(weight_format=form, activation_format=form)
    sizes = programs.Vocabulary(words=48, hidden=16, padded=48)
    for program in (
        programs.linear(quant, 3, 16, 32, MODE, bias=True),
        programs.vocabulary_logits(quant, 3, sizes, MODE),
    ):
        assert names_of(program) == ALONE


def test_int4_weights_that_are_unpacked():
    config = LayerConfig(
        hidden=32, heads=2, feed_forward=48, quant=QuantConfig(weight_format="int4")
    )
    _, activations = names_of(programs.encoder_layer(config, ONE, MODE))
    assert activations["feed_forward.activation"] == [
        "feed_forward.activation",
        "feed_forward.fc2_weight",
    ]
