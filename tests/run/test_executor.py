"""Running programs: checks, gradients, hooks, backends and the profile."""

import pytest
import torch

from lsq.layers import QuantizedLinear, TransformerEncoderLayer, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import linear
from lsq.program.samples import border_tensors
from lsq.program.tensor import VirtualTensor
from lsq.run.backends import backend
from lsq.run.cuda import CUDA, emulated_device
from lsq.run.executor import Execution, Hooks, profile
from lsq.run.frames import FreshFrame
from tests.layers.examples import mode_on
from tests.layers.oracle import assert_same_codes, recorded
from tests.layers.shapes import config_of, gradients
from tests.program.tiny import linear_program, linear_tensors


def run(tensors, backward=True):
    """The result of the small program."""
    (y,) = Execution(linear_program(backward=backward), backend("cpu"))(tensors)
    return y


def feed_forward(backward=True):
    """A program, and tensors for it by name."""
    program = programs.feed_forward(config_of(), 5, mode_on("cpu", backward=backward))
    return program, {virtual.name: tensor for virtual, tensor in border_tensors(program).items()}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("bias", None, "program linear needs a tensor called 'bias'"),
        ("x", torch.zeros(6, 4), r"x is torch.float32 \(6, 4\).*built for torch.float32 \(5, 4\)"),
        ("x", torch.zeros(5, 4).double(), "x is torch.float64 .*built for torch.float32"),
        ("weight", torch.zeros(3, 4).double(), r"weight is torch.float64.*torch.float32 \(3, 4\)"),
        ("bias", torch.zeros(3, 1), r"bias is torch.float32 \(3, 1\).*\(3,\)"),
        ("random_key", torch.zeros(1), r"random_key is torch.float32 \(1,\).*torch.int64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, tensor, message, backward):
    tensors = linear_tensors() | {name: tensor}
    if tensor is None:
        del tensors[name]
    with pytest.raises(ValueError, match=message):
        run(tensors, backward)


def test_gradients_reach_what_wants_them_and_inputs_are_left_alone():
    tensors = linear_tensors()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["weight"].requires_grad_()
    run(tensors).sum().backward()
    torch.testing.assert_close(tensors["weight"].grad, tensors["x"].sum(0).expand(3, 4))
    assert tensors["x"].grad is None and tensors["bias"].grad is None
    assert all(torch.equal(tensors[name], copy) for name, copy in copies.items())


def test_strided_inputs_and_gradients_are_taken():
    tensors = linear_tensors()
    expected = run(tensors)
    tensors["x"] = tensors["x"].t().contiguous().t()
    tensors["weight"] = torch.stack([tensors["weight"]] * 2, dim=2)[..., 0]
    assert torch.equal(run(tensors), expected)
    layer, x = QuantizedLinear(16, 16), torch.randn(5, 16)
    for strided in (torch.Tensor.sum, lambda y: y.t().mul(torch.ones(16, 5)).sum()):
        layer.bias.grad = None
        strided(layer(x)).backward()
        assert torch.equal(layer.bias.grad, torch.full((16,), 5.0))


def test_going_back_twice_gives_the_same():
    tensors = linear_tensors()
    tensors["x"].requires_grad_()
    y = run(tensors)
    (one,), (two,) = (
        torch.autograd.grad(y.sum(), tensors["x"], retain_graph=True) for _ in range(2)
    )
    assert torch.equal(one, two)


def test_hooks_see_every_operation_as_declared_and_on_real_tensors():
    program, tensors = feed_forward()
    seen, measured = [], []

    def shown(when, declared, operation):
        seen.append((when, declared))
        virtual = (*declared.inputs, *declared.outputs)
        real = (*operation.inputs, *operation.outputs)
        assert type(declared) is type(operation)
        assert all(isinstance(tensor, VirtualTensor) for tensor in virtual)
        assert [tuple(tensor.shape) for tensor in real] == [tensor.shape for tensor in virtual]
        if declared.rounding() is None:
            return
        if when == "before":
            measured.append(operation.unrounded(backend("cpu").run))
        else:
            rounding = operation.rounding()
            assert (rounding.decode() - measured[-1]).abs().median() <= rounding.scale

    hooks = Hooks(
        before=lambda *of: shown("before", *of),
        after=lambda *of: shown("after", *of),
    )
    leaf = tensors["fc1_weight"].requires_grad_()
    (y,) = Execution(program, backend("cpu"), hooks=hooks)(tensors)
    torch.autograd.grad(y.sum(), leaf)  # nothing of the backward pass is shown
    forward = program.operations[: program.forward_length]
    assert seen == [(when, operation) for operation in forward for when in ("before", "after")]
    assert len(measured) == 2


def test_every_tensor_comes_from_the_frame():
    program, tensors = feed_forward(backward=False)
    asked, finished = [], []

    class Frame(FreshFrame):
        def tensors_for(self, program, index):
            asked.extend(program.written(index))
            return super().tensors_for(program, index)

        def done(self, program, index):
            finished.append(index)

    values = {tensor: tensors[tensor.name] for tensor in (*program.inputs, *program.parameters)}
    indices = range(program.forward_length)
    Execution(program, backend("cpu")).run(indices, values, Frame(torch.device("cpu")))
    assert asked == [tensor for index in indices for tensor in program.written(index)]
    assert finished == list(indices)


@pytest.mark.parametrize("where", ["cpu", "reference", "emulated"])
def test_a_program_runs_where_it_is_told_to(where, monkeypatch):
    target, ran = backend(where), []
    prepare = target.prepare
    monkeypatch.setattr(
        target, "prepare", lambda calls: ran.append(calls[0][0].name) or prepare(calls)
    )
    program = linear(config_of(mode="float").quant, 5, 8, 8, mode_on(where), bias=True)
    tensors = {virtual.name: tensor for virtual, tensor in border_tensors(program).items()}
    (y,) = Execution(program, target)(tensors)
    torch.testing.assert_close(y, tensors["x"] @ tensors["weight"].t() + tensors["bias"])
    assert ran == ["Project"]


def test_a_module_runs_on_the_backend_that_it_is_given():
    layer = TransformerEncoderLayer(config_of(dropout=0.1, calibration_passes=0))
    x = torch.randn(7, 3, 48, requires_grad=True)
    layer(x)
    results = []
    for name in ("cpu", "reference"):
        torch.manual_seed(1)
        layer.backend = backend(name)
        with recorded(layer) as outcome:
            results.append((outcome, gradients(layer, layer(x), x)))
    (first, found), (second, expected) = results
    assert_same_codes(first.codes, second.codes)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-5, name


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_activations_cross_the_border_in_either_width(given):
    where = CUDA(emulated_device(), activations=torch.bfloat16)
    program = linear(config_of(mode="float").quant, 5, 8, 8, mode_on(where), bias=True)
    x, weight = torch.randn(5, 8).to(given).requires_grad_(), torch.randn(8, 8).requires_grad_()
    key = torch.zeros(1, dtype=torch.int64)
    tensors = {"x": x, "weight": weight, "bias": torch.zeros(8), "random_key": key}
    (y,) = Execution(program, where)(tensors)
    dx, dweight = torch.autograd.grad(y.float().sum(), [x, weight])
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, given, torch.float32)
    near = {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(y.float(), x.float() @ weight.t(), **near)
    torch.testing.assert_close(dx.float(), weight.sum(0).expand(5, 8), **near)
    with pytest.raises(ValueError, match="x is torch.float64 .* was built for torch.bfloat16"):
        Execution(program, where)(tensors | {"x": torch.zeros(5, 8, dtype=torch.float64)})


def test_profiles_count_both_passes_and_nest():
    layer, x = TransformerEncoderLayer(config_of()), torch.randn(5, 3, 48)
    with profile() as seconds:
        layer(x).sum().backward()
        with profile() as inner:
            run(linear_tensors())
    sizes = PackedSequences(rows=15, count=3)
    program = programs.encoder_layer(layer.config, sizes, mode_on("cpu"))
    assert seconds.keys() == {operation.name for operation in program.operations}
    assert all(value > 0 for value in seconds.values()) and inner.keys() == {"Project"}
    before = dict(seconds)
    layer(x)
    assert seconds == before
    layer.backend = backend("reference")
    with profile() as seconds:
        layer(x)
    assert seconds.keys() < before.keys()
