"""Lifetimes on tiny literal programs, and on every real one."""

import pytest
import torch

from lsq.ops import registry
from lsq.program.program import Program, lifetimes_of
from lsq.program.tensor import Operation, VirtualTensor
from tests.program.examples import PROGRAMS


def tensors(text, **options):
    return [VirtualTensor(name=name, shape=(4,), **options) for name in text.split()]


def operations(*pairs):
    """(inputs, outputs) of each operation, whose kind does not matter here."""
    return tuple(
        Operation(definition=registry.definition("add"), inputs=tuple(inputs), outputs=tuple(outputs))
        for inputs, outputs in pairs
    )


def test_a_chain():
    """x -> a -> b -> y: each lives from its operation to the next."""
    x, a, b, y = tensors("x a b y")
    found = lifetimes_of(operations(([x], [a]), ([a], [b]), ([b], [y])), 3, (x,), (y,), ())
    assert found == {x: (0, 0), a: (0, 1), b: (1, 2), y: (2, 2)}


def test_several_readers_and_missing_operands():
    x, a, b, y = tensors("x a b y")
    found = lifetimes_of(operations(([x, None], [a, None]), ([None, a], [b]), ([x, a, b], [y])), 3, (x,), (y,), ())
    assert found == {x: (0, 2), a: (0, 2), b: (1, 2), y: (2, 2)}


def test_inputs_live_from_the_beginning():
    x, late, a, y = tensors("x late a y")
    found = lifetimes_of(operations(([x], [a]), ([a, late], [y])), 2, (x, late), (y,), ())
    assert found[late] == (0, 1)


def test_an_input_that_nobody_reads():
    x, unused, y = tensors("x unused y")
    assert lifetimes_of(operations(([x], [y])), 1, (x, unused), (y,), ())[unused] == (0, 0)


def test_outputs_live_to_the_end_of_the_forward_pass():
    x, y, a, b = tensors("x y a b")
    found = lifetimes_of(operations(([x], [y]), ([x], [a]), ([a], [b])), 3, (x,), (y, b), ())
    assert found[y] == (0, 2)


def test_a_result_that_nobody_reads_lives_for_one_operation():
    x, unread, y = tensors("x unread y")
    assert lifetimes_of(operations(([x], [unread, y])), 1, (x,), (y,), ())[unread] == (0, 0)


def test_gradients_live_to_the_end():
    x, y, dy, dx, dz, other = tensors("x y dy dx dz other")
    found = lifetimes_of(
        operations(([x], [y]), ([dy], [dx]), ([dy], [other]), ([other], [dz])), 1, (x,), (y,), (dx, dz, None)
    )
    assert found[dx] == (1, 3) and found[dz] == (3, 3) and found[dy] == (1, 2) and found[other] == (2, 3)


def test_saved_is_what_crosses_into_the_backward_pass():
    x, a, y, dy, dx = tensors("x a y dy dx")
    wide = VirtualTensor(name="wide", shape=(10,), dtype=torch.int8)
    y.role = "output"
    listed = operations(([x], [a, wide]), ([a], [y]), ([dy, wide, a, x, y], [dx]))
    program = Program(
        name="tiny", operations=listed, forward_length=2, inputs=(x,), parameters=(), outputs=(y,),
        output_gradients=(dy,), differentiable=(x,), gradients=(dx,),
        lifetimes=lifetimes_of(listed, 2, (x,), (y,), (dx,)),
    )
    assert set(program.saved) == {a, wide}
    assert program.saved_bytes == 16 + 10


# Every real program


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_is_written_once_before_it_is_read(name):
    program = PROGRAMS[name]()
    known = {*program.inputs, *program.parameters}
    for index, operation in enumerate(program.operations):
        if index == program.forward_length:
            known.update(program.output_gradients)
        assert all(tensor is None or tensor in known for tensor in operation.inputs), operation.name
        written = [tensor for tensor in operation.outputs if tensor is not None]
        assert not known.intersection(written), operation.name
        known.update(written)
    assert set(program.outputs) <= known
    assert {gradient for gradient in program.gradients if gradient is not None} <= known
    names = [tensor.name for tensor in known]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", PROGRAMS)
def test_lifetimes_are_first_write_to_last_read(name):
    program = PROGRAMS[name]()
    used = {}
    for index, operation in enumerate(program.operations):
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor is not None:
                used.setdefault(tensor, []).append(index)
    last_of_all = len(program.operations) - 1
    for tensor, places in used.items():
        first, last = program.lifetimes[tensor]
        assert first == (0 if tensor in (*program.inputs, *program.parameters) else places[0])
        if tensor in program.gradients:
            assert last == last_of_all
        elif tensor in program.outputs:
            assert last == max(places[-1], program.forward_length - 1)
        else:
            assert last == places[-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_saved_is_int8_and_bits(name):
    """But for the sums before a LayerNorm with their statistics, scales, and LSQ's rounding errors."""
    program = PROGRAMS[name]()
    if "float" in name:
        return
    codes = 0
    for tensor in program.saved:
        end = tensor.name.rsplit(".", 1)[-1]
        if tensor.dtype == torch.float32:
            one_row = len(tensor.shape) == 1 and end in ("scale", "mean", "rstd", "log_normaliser", "row_scale")
            assert one_row or end == "sum" or (end == "error" and "lsq" in name), repr(tensor)
        else:
            assert (tensor.dtype, end) in ((torch.uint8, "clipped"), (torch.int8, "codes"), (torch.int8, "d_logits"))
            codes += tensor.dtype == torch.int8
    assert codes or not program.output_gradients


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_parameter_gets_a_gradient(name):
    program = PROGRAMS[name]()
    if not program.output_gradients:
        assert program.forward_length == len(program.operations) and not program.gradients
        return
    found = dict(zip(program.differentiable, program.gradients, strict=True))
    for parameter in program.parameters:
        gradient = found[parameter]
        assert gradient is not None and gradient.shape == parameter.shape, parameter
        assert gradient.role == "gradient" and gradient.dtype == torch.float32
    float_inputs = {tensor.name for tensor in program.inputs if tensor.name in ("x", "memory")}
    assert {tensor.name for tensor in found if tensor.role == "input"} == float_inputs


def test_saved_bytes_of_an_encoder_layer():
    """A row saves 7 H + F codes and as many bits, two float sums of H before the LayerNorms, and their statistics."""
    program = PROGRAMS["wide encoder"]()
    rows, hidden, inner = 512, 512, 2048
    codes = 7 * hidden + inner
    of_weights = sum(tensor.size for tensor in program.saved if "weight" in tensor.name)
    of_scales = 6 * 4  # one float for each activation
    assert of_weights == (4 * hidden**2 + 2 * hidden * inner) + 4 * (4 * hidden + hidden + inner)
    assert program.saved_bytes == rows * (codes + codes // 8 + 2 * 4 * hidden + 4 * 4) + of_weights + of_scales
