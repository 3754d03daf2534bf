"""print(program) of small programs in full; tests/layers/test_programs.py looks at the text of
every layer."""

from lsq.layers import programs
from tests.layers.examples import mode_on
from tests.layers.shapes import config_of
from tests.program.tiny import linear_program


def test_a_small_program_in_full():
    assert (
        str(linear_program())
        == """\
program linear: 1 operations forward, 3 backward
  inputs: random_key int64[1], x float32[5, 4]
  outputs: y float32[5, 3]
    0  Project(x, weight, bias)
         -> y float32[5, 3]  alive 0..0
  backward
    1  RoundGradient(d_y)
         -> d_bias float32[3]  alive 1..3
    2  ProjectInputGradient(d_y, weight)
         -> d_x float32[5, 4]  alive 2..3
         uses d_x.scratch float32[0, 4]
         uses d_x.scratch.2 float32[5]
    3  ProjectWeightGradient(d_y, x, weight)
         -> d_weight float32[3, 4]  alive 3..3
  saved for the backward pass: 0 bytes"""
    )


def test_what_is_saved_has_its_bytes():
    program = programs.feed_forward(config_of(), 5, mode_on())
    text = str(program)
    assert f"  saved for the backward pass: {program.saved_bytes:,} bytes\n" in text
    assert "         input.codes int8[5, 48]: 240 bytes" in text


def test_backward_has_its_own_heading():
    for backward in (True, False):
        text = str(programs.feed_forward(config_of(), 5, mode_on(backward=backward)))
        assert text.splitlines().count("  backward") == backward
