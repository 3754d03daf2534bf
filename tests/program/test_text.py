"""print(program): everything is there, and it can be read."""

import pytest

from lsq.program import layers
from tests.layers.shapes import config_of
from tests.program.examples import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_is_there(name):
    program = PROGRAMS[name]()
    text = str(program)
    for index, operation in enumerate(program.operations):
        assert f"{index:3d}  {operation.name}(" in text
        for tensor in operation.inputs:
            assert tensor is None or tensor.name in text
        for tensor in operation.outputs:
            if tensor is not None:
                first, last = program.lifetimes[tensor]
                assert f"-> {tensor!r}  alive {first}..{last}\n" in text + "\n"
    for tensor in (*program.inputs, *program.outputs):
        assert repr(tensor) in text
    for tensor in program.saved:
        assert f"{tensor!r}: {tensor.size:,} bytes" in text


def test_parameters_have_shapes():
    assert "fc1_weight float32[112, 48]" in str(layers.feed_forward(config_of(), 5, True, True))


def test_a_small_program_in_full():
    program = layers.linear(config_of(mode="float").quant, 5, 4, 3, True, True, True)
    assert str(program).splitlines()[0] == "program linear: 2 operations forward, 3 backward"
    body = str(program).split("\n    0  ", 1)[1]
    assert "    0  " + body == """\
    0  linear(x, weight)
         -> y float32[5, 3]  alive 0..1
    1  read_product(y, bias)
         -> result float32[5, 3]  alive 1..1
  backward
    2  read_product_backward(d_result)
         -> d_y float32[5, 3]  alive 2..4
         -> d_bias float32[3]  alive 2..4
    3  linear_input_gradient_float(d_y, weight)
         -> d_x float32[5, 4]  alive 3..4
    4  linear_weight_gradient_float(d_y, x)
         -> d_weight float32[3, 4]  alive 4..4
  saved for the backward pass: 0 bytes"""


def test_backward_has_its_own_heading():
    lines = str(layers.feed_forward(config_of(), 5, True, True)).splitlines()
    assert lines.count("  backward") == 1
    assert "  backward" not in str(layers.feed_forward(config_of(), 5, False, False)).splitlines()
