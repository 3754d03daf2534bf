"""Lifetimes on tiny literal programs; tests/layers/test_programs.py looks at every layer's."""

import pytest
import torch

from lsq.layers import programs
from lsq.ops.rounding import Add
from lsq.program.program import Program, lifetimes_of
from lsq.program.tensor import VirtualTensor
from tests.layers.examples import mode_on
from tests.layers.shapes import config_of
from tests.program.tiny import linear_program


@pytest.mark.parametrize(
    "used, inputs, outputs, gradients, forward, lives",
    [
        # a chain: each lives from its operation to the next
        ("xa ab by", "x", "y", "", 3, {"x": (0, 0), "a": (0, 1), "b": (1, 2), "y": (2, 2)}),
        # several readers
        ("xa ab xaby", "x", "y", "", 3, {"x": (0, 2), "a": (0, 2), "b": (1, 2), "y": (2, 2)}),
        # inputs live from the beginning, also one that nobody reads
        ("xa aly", "xlu", "y", "", 2, {"l": (0, 1), "u": (0, 0)}),
        # outputs live to the end of the forward pass, a result that nobody reads for one operation
        ("xy xu xa ab", "x", "yb", "", 4, {"y": (0, 3), "u": (1, 1), "b": (3, 3)}),
        # gradients live to the end
        ("xy dg do oh", "x", "y", "gh", 1, {"g": (1, 3), "h": (3, 3), "d": (1, 2), "o": (2, 3)}),
    ],
)
def test_lifetimes(used, inputs, outputs, gradients, forward, lives):
    """A letter is a tensor, a word what one operation reads and writes."""
    known = {
        letter: VirtualTensor(name=letter, shape=(4,)) for letter in set(used + inputs) - {" "}
    }

    def tensors(letters):
        return tuple(map(known.get, letters))

    found = lifetimes_of(
        [tensors(word) for word in used.split()],
        forward,
        tensors(inputs),
        tensors(outputs),
        (*tensors(gradients), None),
    )
    assert {letter: found[known[letter]] for letter in lives} == lives


def test_saved_is_what_crosses_into_the_backward_pass():
    names = ("x", "a", "b", "y", "dy", "dx", "used")
    x, a, b, y, dy, dx, used = (VirtualTensor(name=name, shape=(4,)) for name in names)
    y.role = "output"
    sums = (x, x, a), (a, x, b), (b, a, y), (dy, b, dx), (y, x, dx)
    listed = tuple(Add(a=first, b=second, out=out) for first, second, out in sums)
    scratch = (used,), (), (), (), ()
    read_and_written = [
        (*one.inputs, *one.outputs, *extra) for one, extra in zip(listed, scratch, strict=True)
    ]
    program = Program(
        name="tiny",
        operations=listed,
        scratch=scratch,
        forward_length=3,
        inputs=(x,),
        parameters=(),
        weights={},
        activations=(),
        outputs=(y,),
        output_gradients=(dy,),
        differentiable=(x,),
        gradients=(dx,),
        lifetimes=lifetimes_of(read_and_written, 3, (x,), (y,), (dx,)),
    )
    assert program.saved == (b,) and program.saved_bytes == 16
    assert program.written(0) == (a, used) and program.written(1) == (b,)
    assert program.backward_range == range(3, 5) and program.lifetimes[used] == (0, 0)


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


def test_what_is_saved_has_its_bytes_and_backward_its_own_heading():
    program = programs.feed_forward(config_of(), 5, mode_on())
    text = str(program)
    assert f"  saved for the backward pass: {program.saved_bytes:,} bytes\n" in text
    assert "         input.codes int8[5, 48]: 240 bytes" in text
    assert text.splitlines().count("  backward") == 1
    forward = str(programs.feed_forward(config_of(), 5, mode_on(backward=False)))
    assert "  backward" not in forward.splitlines()


@pytest.mark.parametrize(
    "shape, dtype, size, text",
    [
        ((21, 48), torch.float32, 4032, "x float32[21, 48]"),
        ((21, 48), torch.int8, 1008, "x int8[21, 48]"),
        ((5,), torch.int64, 40, "x int64[5]"),
        ((0, 7), torch.float32, 0, "x float32[0, 7]"),
    ],
)
def test_virtual_tensors(shape, dtype, size, text):
    a, b = (VirtualTensor(name="x", shape=shape, dtype=dtype) for _ in range(2))
    assert a.size == size and repr(a) == text
    assert a != b and len({a, b}) == 2  # equal to themselves alone
