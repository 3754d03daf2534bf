"""The Builder: names, weights, what a backend asks for, borders and gradients of a program."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.rounding import Add
from lsq.program.builder import Recorder
from lsq.program.tensor import Kind, Parameter
from lsq.run.backends import backend
from lsq.run.cuda import CUDA, emulated_device
from lsq.run.executor import Execution
from tests.constants import quant_with
from tests.program.tiny import FLOAT, builder, project, rounded

INT8 = QuantConfig(backward="int8")


def add(recorder: Recorder, a, b):
    """The sum of two tensors."""
    return recorder.add(Add(a=a, b=b, out=recorder.like("sum", a))).out


def test_what_stems_from_nothing_that_is_wanted_needs_no_gradient():
    recorder = Recorder(wanted={"table", "c"})
    a, b, c = (recorder.input(name, (5, 4)) for name in "abc")
    table = recorder.parameter("table", (5, 4), Kind.TABLE)
    needless = add(recorder, a, b)
    needed = add(recorder, needless, c)
    for tensor in (c, table, needed, add(recorder, needed, a)):
        assert recorder.needs_gradient(tensor), tensor
    for tensor in (a, b, needless, None):
        assert not recorder.needs_gradient(tensor), tensor
    everything = Recorder()
    x = everything.input("x", (5, 4))
    assert everything.needs_gradient(x) and everything.needs_gradient(add(everything, x, x))


def described(tensor):
    return tensor.shape, tensor.dtype, tensor.role


@pytest.mark.parametrize("granularity, clips", [("channel", (3,)), ("tensor", (1,))])
def test_a_rounded_weight_declares_its_clip_and_brings_its_codes(granularity, clips):
    b = builder(quant_with(weight_granularity=granularity, weight_clip=0.7))
    weight = b.weight("weight", (3, 16), rows=16, bound=0.2)
    assert b.weight("weight", (3, 16)) is weight
    assert weight.values.declared == Parameter(
        name="weight", shape=(3, 16), kind=Kind.WEIGHT, bound=0.2, clip="weight_clip"
    )
    assert weight.clip.declared == Parameter(
        name="weight_clip", shape=clips, kind=Kind.WEIGHT_CLIP, start=0.7
    )
    assert described(weight.codes) == ((16, 16), torch.int8, "input")
    assert described(weight.scale) == ((16,), torch.float32, "input")
    program = b.build()
    assert program.weights == {"weight": weight}
    assert {weight.codes, weight.scale} <= {*program.inputs}
    weight = builder().weight("weight", (3, 4))  # in float mode, values alone
    assert weight.codes is weight.scale is weight.clip is weight.values.declared.clip is None


@pytest.mark.parametrize(
    "options, kept", [({}, "clipped"), ({"clip_gradient": "lsq"}, "clipped error"), (None, "")]
)
def test_an_activation_keeps_what_its_gradient_needs(options, kept):
    b = builder(quant_with(activation_clip=3.0, **options or {}), backward=options is not None)
    coded = b.coded("x", (5, 3), "x_clip")
    assert coded.codes.dtype == torch.int8 and coded.scale.shape == (1,)
    assert coded.clip.declared == Parameter(
        name="x_clip", shape=(1,), kind=Kind.ACTIVATION_CLIP, start=3.0
    )
    found = [name for name in ("clipped", "error") if getattr(coded, name) is not None]
    assert found == kept.split()
    if kept:
        assert described(coded.clipped)[:2] == ((2,), torch.uint8)


# Where it will run


def test_activations_are_as_wide_as_the_backend_has_them():
    b = builder(INT8, where=CUDA(emulated_device(), activations=torch.bfloat16))
    bias = b.parameter("bias", (16,), Kind.BIAS)
    y = project(b, rounded(b, b.input("x", (5, 16))), "weight", (16, 16), bias=bias)
    b.output(y)
    dtypes = {tensor.name: tensor.dtype for tensor in b.build().lifetimes}
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert narrow == {"x", "y", "d_x.codes", "d_y"}
    assert y.size == 2 * 5 * 16 and dtypes["d_bias"] == dtypes["d_weight"] == torch.float32
    assert builder(FLOAT).tensor("x", (1,)).dtype == torch.float32


# Gradients


def names(program):
    """Names of the operations forward and backward."""
    listed = [operation.name for operation in program.operations]
    return listed[: program.forward_length], listed[program.forward_length :]


def run(program, tensors):
    """Outputs, and the gradients of what is differentiable by name, for upstream gradients of
    ones."""
    given = {"random_key": torch.zeros(1, dtype=torch.int64), **tensors}
    wanted = [virtual.name for virtual in program.differentiable]
    outputs = Execution(program, backend("cpu"))(
        {name: tensor.requires_grad_(name in wanted) for name, tensor in given.items()}
    )
    gradients = torch.autograd.grad(
        outputs, [given[name] for name in wanted], list(map(torch.ones_like, outputs))
    )
    return outputs, dict(zip(wanted, gradients, strict=True))


def test_borders_of_a_program():
    b = builder()
    b.output(project(b, b.input("x", (5, 4)), "weight", (3, 4)))
    program = b.build()
    assert names(program) == (["Project"], ["ProjectInputGradient", "ProjectWeightGradient"])
    assert [t.name for t in program.inputs] == ["random_key", "x"]
    assert [t.name for t in program.parameters] == ["weight"]
    assert [t.name for t in program.output_gradients] == ["d_y"]
    pairs = zip(program.differentiable, program.gradients, strict=True)
    assert [(t.name, g.name) for t, g in pairs] == [("x", "d_x"), ("weight", "d_weight")]
    b = builder(backward=False)
    b.output(project(b, b.input("x", (5, 4)), "weight", (3, 4)))
    program = b.build()
    assert names(program) == (["Project"], [])
    assert program.output_gradients == program.differentiable == program.gradients == ()


def added_by_products(program):
    """What each ProjectInputGradient adds to its result."""
    operations = (one for one in program.operations if one.name == "ProjectInputGradient")
    return [one.added and one.added.name for one in operations]


def test_gradients_of_several_readers_are_added_by_who_makes_them():
    b, weights = builder(), ("first", "second", "third")
    x = b.input("x", (5, 4))
    for name in weights:
        b.output(project(b, x, name, (3, 4)))
    program = b.build()
    assert added_by_products(program) == [None, "d_x", "d_x.2"] and "Add" not in names(program)[1]
    tensors = {name: torch.randn(3, 4) for name in weights} | {"x": torch.randn(5, 4)}
    _, found = run(program, tensors)
    total = sum(tensors[name].sum(0) for name in weights)
    torch.testing.assert_close(found["x"], total.expand(5, 4))
    torch.testing.assert_close(found["second"], tensors["x"].sum(0).expand(3, 4))


def norm(b, residual, update=None, name="norm", **fields):
    """A LayerNorm that others may read as floats."""
    columns = residual.shape[1:]
    return b.add(
        ResidualNorm(
            sum=ResidualSum(
                residual=residual,
                update=update,
                z=None if update is None else b.like("z", residual),
            ),
            epsilon=1e-5,
            weight=b.parameter(name, columns, Kind.NORM_WEIGHT),
            bias=b.parameter(name + "_bias", columns, Kind.NORM_BIAS),
            mean=b.tensor("mean", residual.shape[:1]),
            rstd=b.tensor("rstd", residual.shape[:1]),
            **fields,
        )
    )


def test_gradients_that_nobody_adds_up_get_a_sum():
    """x is the residual of one norm, and of another before it."""
    b = builder()
    x = b.input("x", (5, 8))
    first = norm(b, x, project(b, x, "a", (8, 8)), out=b.like("first", x), name="one").out
    second = norm(b, x, project(b, first, "b", (8, 8)), out=b.like("second", x), name="two").out
    b.output(second)
    program = b.build()
    assert names(program)[1].count("Add") == 1
    tensors = {name: torch.zeros(8) for name in ("one_bias", "two_bias")}
    tensors |= {"one": torch.ones(8), "two": torch.randn(8)}
    tensors |= {"x": torch.randn(5, 8), "a": torch.randn(8, 8), "b": torch.randn(8, 8)}
    (found,), gradients = run(program, tensors)

    def layer_norm(z, name):
        return torch.nn.functional.layer_norm(z, (8,), tensors[name], tensors[name + "_bias"], 1e-5)

    x, a, b = (tensors[name] for name in ("x", "a", "b"))
    expected = layer_norm(x + layer_norm(x + x @ a.t(), "one") @ b.t(), "two")
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sum(), [tensors[name] for name in gradients])
    torch.testing.assert_close([*gradients.values()], [*wanted], atol=1e-5, rtol=1e-4)


def test_a_tensor_and_its_rounded_copy_share_a_gradient():
    b = builder(INT8)
    x = b.input("x", (5, 16))
    made = norm(b, x, out=b.like("out", x), rounded=b.coded("codes", x.shape, "codes_clip"))
    b.output(project(b, made.rounded, "first", (16, 16)))
    b.output(project(b, rounded(b, made.out, "again"), "second", (16, 16)))
    program = b.build()
    assert "Add" not in names(program)[1]
    assert added_by_products(program) == [None, "d_again.codes"]


def test_no_two_roundings_share_random_words():
    """Errors of a gradient and of what it is multiplied by must not go together: the product would
    have a bias."""
    b = builder(INT8)
    x = b.input("x", (5, 16))
    for name in ("first", "second", "third"):
        x = project(b, rounded(b, x, name + "_x"), name, (16, 16))
    b.output(x)
    # where a gradient is made, and where one of a weight is
    names = ("rounded.subsequence", "subsequence")
    found = [
        operation.attributes().get(name) for operation in b.build().operations for name in names
    ]
    drawn = [number for number in found if number]
    assert len(drawn) == len(set(drawn)) == 3 + 3


@pytest.mark.parametrize(
    "hidden, message", [(False, "parameter weight has"), (True, "the product hidden has")]
)
def test_parameters_and_products_have_one_reader(hidden, message):
    b = builder()
    x = b.input("x", (5, 4))
    if hidden:
        x = project(b, x, "weight", (4, 4), result="hidden")
    for name in ("first", "second"):
        b.output(project(b, x, name if hidden else "weight", (3, 4)))
    with pytest.raises(ValueError, match=f"{message} two readers in program tiny"):
        b.build()


@pytest.mark.parametrize("names", [("first", "second"), ("first", "second", "third")])
def test_a_product_has_readers_that_join_their_gradients(names):
    b = builder()
    hidden = project(b, b.input("x", (5, 4)), "weight", (4, 4), result="hidden")
    for name in names:
        b.output(project(b, hidden, name, (3, 4), accumulates=name != "first"))
    tensors = {name: torch.randn(shape) for name, shape in (("x", (5, 4)), ("weight", (4, 4)))}
    tensors |= {name: torch.randn(3, 4) for name in names}
    _, found = run(b.build(), tensors)
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    between = leaves["x"] @ leaves["weight"].t()
    total = sum((between @ leaves[name].t()).sum() for name in names)
    expected = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    torch.testing.assert_close(found, expected, check_stride=False)
