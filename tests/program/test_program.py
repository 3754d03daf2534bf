"""Lifetimes on tiny literal programs; tests/layers/test_programs.py looks at every layer's."""

from lsq.ops.rounding import Add
from lsq.program.program import Program, lifetimes_of
from lsq.program.tensor import VirtualTensor
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
