"""Programs of whole layers: built once for each shape, with the operations that the design names."""

from collections import Counter

import pytest

from lsq.program import layers
from tests.layers.shapes import config_of


def forward_of(program):
    return Counter(operation.name for operation in program.operations[: program.forward_length])


def test_a_program_is_built_once():
    arguments = (3, 7, True, True, True)
    first = layers.encoder_layer(config_of(), *arguments)
    assert layers.encoder_layer(config_of(), *arguments) is first
    assert layers.encoder_layer(config_of(dropout=0.1), *arguments) is not first
    assert layers.encoder_layer(config_of(), 3, 8, True, True, True) is not first


@pytest.mark.parametrize("pre_norm", [False, True])
def test_an_encoder_layer_fuses_everything_between_products(pre_norm):
    expected = {
        "quantize_weight": 4, "linear_int8": 3, "linear_int32": 1, "split_heads": 1, "attention": 1, "merge_heads": 1,
        "bias_activation_dropout": 1, "bias_dropout_residual_layer_norm": 3 if pre_norm else 2,
    }
    if not pre_norm:
        expected["quantize"] = 1  # the input; elsewhere the rounding is part of the norm
    assert forward_of(layers.encoder_layer(config_of(pre_norm=pre_norm), 3, 7, True, True, True)) == expected


def test_a_decoder_layer_rounds_its_memory():
    found = forward_of(layers.decoder_layer(config_of(pre_norm=True), 3, 7, 9, True, False, True, True))
    assert found["quantize"] == 1 and found["linear_int8"] == 6 and found["linear_int32"] == 1
    assert found["attention"] == 2 and found["split_heads"] == 3


def test_float_programs_round_nothing():
    for program in (
        layers.encoder_layer(config_of(mode="float"), 3, 7, True, True, True),
        layers.decoder_layer(config_of(mode="float"), 3, 7, 9, True, False, True, True),
    ):
        assert not any("int" in name or "quantize" in name for name in forward_of(program))
        assert {str(t.dtype) for op in program.operations for t in op.outputs if t is not None} == {"torch.float32"}


def test_a_step_makes_one_key_and_value():
    program = layers.decoder_step(config_of(), 3, 4, 9, True)
    assert [tensor.shape for tensor in program.outputs] == [(3, 48), (3, 3, 5, 16), (3, 3, 5, 16)]
    assert forward_of(program)["append_time"] == 2
