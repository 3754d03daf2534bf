"""Running programs: checks, memory that is given back, hooks, backends and the profile."""

import pytest
import torch

from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.program import Execution, executor, layers, profile
from lsq.program.executor import Hooks, backend
from lsq.program.frames import FreshFrame
from tests.layers.oracle import assert_same_codes, recorded
from tests.layers.shapes import config_of, gradients
from tests.ops.compare import border_tensors
from tests.program.examples import PROGRAMS


def linear_program(backward=True):
    return layers.linear(config_of(mode="float").quant, 5, 4, 3, True, True, backward)


def linear_tensors():
    return {
        "x": torch.randn(5, 4), "weight": torch.randn(3, 4), "bias": torch.randn(3),
        "random_key": torch.zeros(1, dtype=torch.int64),
    }


def tensors_for(program):
    return {virtual.name: tensor for virtual, tensor in border_tensors(program).items()}


@pytest.mark.parametrize("backward", [False, True])
def test_a_missing_tensor_is_named(backward):
    tensors = linear_tensors()
    del tensors["bias"]
    with pytest.raises(ValueError, match="program linear needs a tensor called 'bias'"):
        Execution(linear_program(backward))(tensors)


@pytest.mark.parametrize("name, tensor, message", [
    ("x", torch.zeros(6, 4), r"x is torch.float32 \(6, 4\).*built for torch.float32 \(5, 4\)"),
    ("weight", torch.zeros(3, 4, dtype=torch.float64), r"weight is torch.float64.*torch.float32 \(3, 4\)"),
    ("bias", torch.zeros(3, 1), r"bias is torch.float32 \(3, 1\).*\(3,\)"),
])
def test_a_tensor_that_does_not_fit_is_named(name, tensor, message):
    with pytest.raises(ValueError, match=message):
        Execution(linear_program())(linear_tensors() | {name: tensor})


def test_gradients_reach_what_wants_them():
    tensors = linear_tensors()
    tensors["weight"].requires_grad_()
    (y,) = Execution(linear_program())(tensors)
    y.sum().backward()
    torch.testing.assert_close(tensors["weight"].grad, tensors["x"].sum(0).expand(3, 4))
    assert tensors["x"].grad is None and tensors["bias"].grad is None


def test_strided_inputs_are_taken():
    tensors = linear_tensors()
    (expected,) = Execution(linear_program())(tensors)
    tensors["x"] = tensors["x"].t().contiguous().t()
    tensors["weight"] = torch.stack([tensors["weight"]] * 2, dim=2)[..., 0]
    (found,) = Execution(linear_program())(tensors)
    assert torch.equal(found, expected)


def test_strided_gradients_are_taken():
    layer = QuantizedLinear(16, 16)
    x = torch.randn(5, 16)
    y = layer(x)
    y.sum().backward()  # an expanded gradient
    expected = layer.bias.grad.clone()
    assert torch.equal(expected, torch.full((16,), 5.0))
    layer.bias.grad = None
    layer(x).t().mul(torch.ones(16, 5)).sum().backward()
    assert torch.equal(layer.bias.grad, expected)


def test_inputs_are_left_alone():
    tensors = linear_tensors()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["weight"].requires_grad_()
    Execution(linear_program())(tensors)[0].square().sum().backward()
    assert all(torch.equal(tensors[name], copy) for name, copy in copies.items())


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_given_back_after_the_last_reader(name):
    program = PROGRAMS[name]()
    read = {tensor for operation in program.operations for tensor in operation.inputs}
    values = {virtual: tensor for virtual, tensor in border_tensors(program).items() if virtual in read}
    for stretch in ((0, program.forward_length), (program.forward_length, len(program.operations))):
        position = iter(range(*stretch))

        def check(operation, alive, position=position):
            index = next(position)
            for tensor in alive:
                if tensor.role not in ("output", "gradient"):
                    assert program.lifetimes.get(tensor, (0, index))[1] >= index, f"{tensor!r} at {index}"
            assert all(tensor is None or tensor in alive for tensor in operation.inputs)

        executor.run(program, *stretch, values, Hooks(before=check), FreshFrame())
    assert {tensor.role for tensor in values} <= {"output", "gradient"}


def test_hooks_see_every_operation():
    program = layers.feed_forward(config_of(), 5, True, True)
    seen = []
    hooks = Hooks(
        before=lambda operation, values: seen.append(("before", operation.name)),
        after=lambda operation, values: seen.append(("after", operation.name)),
    )
    Execution(program, hooks)(tensors_for(program))
    forward = [operation.name for operation in program.operations[: program.forward_length]]
    assert seen == [(when, name) for name in forward for when in ("before", "after")]


def test_every_tensor_comes_from_the_frame():
    program = layers.feed_forward(config_of(), 5, False, False)
    asked, finished = [], []

    class Frame(FreshFrame):
        def tensors_for(self, index, operation):
            asked.extend(t for t in operation.written if t is not None)
            return super().tensors_for(index, operation)

        def done(self, index, operation):
            finished.append(index)

    tensors = tensors_for(program)
    values = {tensor: tensors[tensor.name] for tensor in (*program.inputs, *program.parameters)}
    executor.run(program, 0, program.forward_length, values, Hooks(), Frame())
    assert asked == [t for operation in program.operations for t in operation.written if t is not None]
    assert finished == list(range(program.forward_length))


def test_backends_agree():
    layer = TransformerEncoderLayer(config_of(dropout=0.1, calibration_passes=0))
    x = torch.randn(7, 3, 48, requires_grad=True)
    layer(x)
    results = []
    for name in ("cpu", "reference"):
        torch.manual_seed(1)
        with backend(name), recorded(layer) as outcome:
            results.append((outcome, gradients(layer, layer(x), x)))
    (first, found), (second, expected) = results
    assert_same_codes(first.codes, second.codes)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-5, name


def test_a_backend_ends_with_its_block():
    with backend("reference"):
        with backend("cpu"):
            assert executor._backend == "cpu"
        assert executor._backend == "reference"
        with pytest.raises(RuntimeError), backend("cpu"):
            raise RuntimeError
        assert executor._backend == "reference"
    assert executor._backend is None


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="'cuda'; allowed: cpu, reference"), backend("cuda"):
        pass


def test_profile_counts_both_passes():
    layer = TransformerEncoderLayer(config_of())
    x = torch.randn(5, 3, 48)
    with profile() as seconds:
        layer(x).sum().backward()
    program = layers.encoder_layer(layer.config, 3, 5, False, True, True)
    assert seconds.keys() == {operation.name for operation in program.operations}
    assert all(value > 0 for value in seconds.values())
    before = dict(seconds)
    layer(x)
    assert seconds == before


def test_profiles_nest():
    tensors = linear_tensors()
    with profile() as outer:
        Execution(linear_program())(tensors)
        with profile() as inner:
            Execution(linear_program())(tensors)
    assert inner.keys() == outer.keys() == {"linear", "read_product"}
