"""The Builder: names, parameters, gradients that are added up, and what is computed again instead of saved."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.program import blocks
from lsq.program.builder import Builder
from lsq.program.executor import Execution
from tests.layers.shapes import config_of

FLOAT = QuantConfig(mode="float")


def builder(quant=FLOAT, *, training=True, backward=True):
    return Builder("tiny", quant, training=training, backward=backward)


def names(program):
    """Names of the operations forward and backward."""
    listed = [operation.name for operation in program.operations]
    return listed[: program.forward_length], listed[program.forward_length :]


def test_taken_names_are_numbered():
    b = builder()
    assert [b.temporary("x", (1,)).name for _ in range(3)] == ["x", "x.2", "x.3"]
    assert b.input("x", (1,)).name == "x.4"


def test_a_parameter_is_one_tensor():
    b = builder()
    weight = b.parameter("weight", (3, 4))
    assert b.parameter("weight", (3, 4)) is weight
    assert weight.role == "parameter"


def test_streams_are_never_used_twice():
    b = builder()
    assert len({b.next_stream() for _ in range(5)}) == 5


def test_a_linear_layer():
    b = builder()
    x = b.input("x", (5, 4))
    b.output(blocks.linear(b, x, "weight", (3, 4), clip=None, output="y").value)
    program = b.build()
    assert names(program) == (["linear"], ["linear_input_gradient_float", "linear_weight_gradient_float"])
    assert [t.name for t in program.inputs] == ["random_key", "x"]
    assert [t.name for t in program.parameters] == ["weight"]
    assert [t.name for t in program.output_gradients] == ["d_y"]
    assert [(t.name, g.name) for t, g in zip(program.differentiable, program.gradients, strict=True)] == [
        ("x", "d_x"), ("weight", "d_weight")
    ]


def test_without_a_backward_pass():
    b = builder(backward=False)
    x = b.input("x", (5, 4))
    b.output(blocks.linear(b, x, "weight", (3, 4), clip=None, output="y").value)
    program = b.build()
    assert names(program) == (["linear"], [])
    assert program.output_gradients == program.differentiable == program.gradients == ()


def test_gradients_of_two_readers_are_added():
    b = builder()
    x = b.input("x", (5, 4))
    for name in ("first", "second", "third"):
        b.output(blocks.linear(b, x, name, (3, 4), clip=None, output="y").value)
    program = b.build()
    _, backward = names(program)
    assert backward.count("add") == 2
    tensors = {name: torch.randn(3, 4, requires_grad=True) for name in ("first", "second", "third")}
    x = torch.randn(5, 4, requires_grad=True)
    outputs = Execution(program)({**tensors, "x": x, "random_key": torch.zeros(1, dtype=torch.int64)})
    upstream = [torch.randn(5, 3) for _ in outputs]
    found = torch.autograd.grad(outputs, [x, *tensors.values()], upstream)
    expected = torch.autograd.grad([x @ t.t() for t in tensors.values()], [x, *tensors.values()], upstream)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_chain_of_two_linears():
    b = builder()
    x = b.input("x", (5, 4))
    hidden = blocks.linear(b, x, "first", (6, 4), clip=None, output="h")
    b.output(blocks.linear(b, hidden.value, "second", (3, 6), clip=None, output="y").value)
    program = b.build()
    tensors = {"first": torch.randn(6, 4), "second": torch.randn(3, 6), "x": torch.randn(5, 4)}
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    (y,) = Execution(program)({**tensors, "random_key": torch.zeros(1, dtype=torch.int64)})
    expected = tensors["x"] @ tensors["first"].t() @ tensors["second"].t()
    torch.testing.assert_close(y, expected)
    for gradient, wanted in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)
    assert [tensor.name for tensor in program.saved] == ["h"]


def test_a_parameter_has_one_reader():
    b = builder()
    x = b.input("x", (5, 4))
    for output in ("a", "b"):
        b.output(blocks.linear(b, x, "weight", (3, 4), clip=None, output=output).value)
    with pytest.raises(ValueError, match="parameter weight has two readers in program tiny"):
        b.build()


def test_an_unknown_operation():
    with pytest.raises(KeyError, match="fold"):
        builder().emit("fold", (), ())


def feed_forward(**options):
    """activation between two rounded products, which asks for its result in the backward pass."""
    config = config_of(**options)
    b = builder(config.quant)
    x = b.input("x", (5, 48))
    product = blocks.linear(
        b, blocks.quantize(b, x, "input_clip"), "first", (112, 48), clip="hidden_clip", output="hidden"
    )
    activated = blocks.activation(b, config, product, "bias", prefix="")
    b.output(blocks.read(b, blocks.linear(b, activated, "second", (48, 112), clip=None, output="out"), None))
    return b.build()


@pytest.mark.parametrize("options", [{}, {"clip_gradient": "lsq"}, {"backward": "int8"}])
def test_activations_are_computed_again_once(options):
    program = feed_forward(dropout=0.1, **options)
    forward, backward = names(program)
    assert forward.count("bias_activation_dropout") == backward.count("bias_activation_dropout") == 1
    saved = {tensor.name for tensor in program.saved}
    assert "hidden.codes" in saved and not any(name.startswith("activation") for name in saved)
    first, again = (op for op in program.operations if op.name == "bias_activation_dropout")
    assert first.inputs == again.inputs and first.attributes == again.attributes
    copies = [tensor.name for tensor in again.outputs if tensor is not None]
    assert all(name.endswith(".again") for name in copies)
    last = max(i for i, op in enumerate(program.operations) if any(t in op.inputs for t in again.outputs if t))
    assert program.lifetimes[again.outputs[0]][1] == last


def test_weights_come_as_codes_without_a_backward_pass():
    b = builder(QuantConfig(), backward=False)
    x = b.input("x", (5, 48))
    product = blocks.linear(b, blocks.quantize(b, x, "input_clip"), "weight", (33, 48), clip=None, output="y", rows=48)
    b.output(blocks.read(b, product, None))
    program = b.build()
    assert names(program)[0] == ["quantize", "linear_int32", "read_product"]
    assert {(t.name, t.shape, t.dtype) for t in program.inputs} >= {
        ("weight.codes", (48, 48), torch.int8), ("weight.scale", (48,), torch.float32)
    }
    assert [t.name for t in program.parameters] == ["input_clip"]


def test_dropout_is_off_outside_training():
    config = config_of(dropout=0.3)
    for training, expected in ((True, 0.3), (False, 0.0)):
        b = builder(config.quant, training=training)
        x = b.input("x", (5, 48))
        product = blocks.linear(b, blocks.quantize(b, x, "x_clip"), "first", (112, 48), clip="y_clip", output="y")
        blocks.activation(b, config, product, "bias", prefix="")
        assert b._operations[-1].attributes["dropout"] == expected


def test_the_int8_gradient_has_codes_and_a_row_scale():
    program = feed_forward(backward="int8")
    written = {t.name: t for operation in program.operations for t in operation.outputs if t is not None}
    for product, columns in (("out", 48), ("hidden.codes", 112)):
        gradient = written[f"d_{product}"]
        assert gradient.dtype == torch.int8 and gradient.shape == (5, columns)
        assert written[f"d_{product}.row_scale"].shape == (5,)


def test_every_rounding_at_random_has_its_own_stream():
    program = feed_forward(backward="int8", dropout=0.1)
    streams = [op.attributes["gradient_stream"] for op in program.operations if "gradient_stream" in op.attributes]
    streams += [op.attributes["stream"] for op in program.operations if op.name == "linear_weight_gradient"]
    streams += {op.attributes["stream"] for op in program.operations if op.name == "bias_activation_dropout"}
    assert len(streams) == len(set(streams)) == 5
