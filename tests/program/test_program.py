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


def tensors(text, **options):
    return [VirtualTensor(name=name, shape=(4,), **options) for name in text.split()]


def test_a_chain():
    """x -> a -> b -> y: each lives from its operation to the next."""
    x, a, b, y = tensors("x a b y")
    found = lifetimes_of([(x, a), (a, b), (b, y)], 3, (x,), (y,), ())
    assert found == {x: (0, 0), a: (0, 1), b: (1, 2), y: (2, 2)}


def test_several_readers():
    x, a, b, y = tensors("x a b y")
    found = lifetimes_of([(x, a), (a, b), (x, a, b, y)], 3, (x,), (y,), ())
    assert found == {x: (0, 2), a: (0, 2), b: (1, 2), y: (2, 2)}


def test_inputs_live_from_the_beginning():
    x, late, a, y = tensors("x late a y")
    found = lifetimes_of([(x, a), (a, late, y)], 2, (x, late), (y,), ())
    assert found[late] == (0, 1)


def test_an_input_that_nobody_reads():
    x, unused, y = tensors("x unused y")
    assert lifetimes_of([(x, y)], 1, (x, unused), (y,), ())[unused] == (0, 0)


def test_outputs_live_to_the_end_of_the_forward_pass():
    x, y, a, b = tensors("x y a b")
    found = lifetimes_of([(x, y), (x, a), (a, b)], 3, (x,), (y, b), ())
    assert found[y] == (0, 2)


def test_a_result_that_nobody_reads_lives_for_one_operation():
    x, unread, y = tensors("x unread y")
    assert lifetimes_of([(x, unread, y)], 1, (x,), (y,), ())[unread] == (0, 0)


def test_gradients_live_to_the_end():
    x, y, dy, dx, dz, other = tensors("x y dy dx dz other")
    found = lifetimes_of(
        [(x, y), (dy, dx), (dy, other), (other, dz)], 1, (x,), (y,), (dx, dz, None)
    )
    assert (
        found[dx] == (1, 3)
        and found[dz] == (3, 3)
        and found[dy] == (1, 2)
        and found[other] == (2, 3)
    )


def test_saved_is_what_crosses_into_the_backward_pass():
    x, a, b, y, dy, dx, used = tensors("x a b y dy dx used")
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


def test_scratch_memory_lives_for_its_operation():
    program = linear_program()
    assert any(program.scratch)
    for index, scratch in enumerate(program.scratch):
        assert all(
            program.lifetimes[tensor] == (index, index) and tensor.role == "temporary"
            for tensor in scratch
        )


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


@pytest.mark.parametrize(
    "shape, dtype, size",
    [
        ((21, 48), torch.float32, 4032),
        ((21, 48), torch.int8, 1008),
        ((5,), torch.int64, 40),
        ((0, 7), torch.float32, 0),
    ],
)
def test_bytes(shape, dtype, size):
    assert VirtualTensor(name="x", shape=shape, dtype=dtype).size == size


def test_text():
    assert (
        repr(VirtualTensor(name="codes", shape=(21, 48), dtype=torch.int8)) == "codes int8[21, 48]"
    )
    assert repr(VirtualTensor(name="scale", shape=(1,))) == "scale float32[1]"


def test_tensors_equal_only_themselves():
    a, b = (VirtualTensor(name="x", shape=(1,)) for _ in range(2))
    assert a != b and len({a, b}) == 2
