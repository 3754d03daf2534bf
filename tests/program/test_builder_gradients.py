"""The Builder: borders of a program, gradients that are added up, and what is refused."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.program.parameters import Kind
from lsq.run.backends import backend
from lsq.run.executor import Execution
from tests.program.tiny import builder, project, rounded

INT8 = QuantConfig(backward="int8")


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


def test_without_a_backward_pass():
    b = builder(backward=False)
    b.output(project(b, b.input("x", (5, 4)), "weight", (3, 4)))
    program = b.build()
    assert names(program) == (["Project"], [])
    assert program.output_gradients == program.differentiable == program.gradients == ()


def test_gradients_of_several_readers_are_added_by_who_makes_them():
    b, weights = builder(), ("first", "second", "third")
    x = b.input("x", (5, 4))
    for name in weights:
        b.output(project(b, x, name, (3, 4)))
    program = b.build()
    added = [
        op.added and op.added.name for op in program.operations if op.name == "ProjectInputGradient"
    ]
    assert added == [None, "d_x", "d_x.2"] and "Add" not in names(program)[1]
    tensors = {name: torch.randn(3, 4) for name in weights} | {"x": torch.randn(5, 4)}
    _, found = run(program, tensors)
    torch.testing.assert_close(
        found["x"], sum(tensors[name].sum(0) for name in weights).expand(5, 4)
    )
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
    weights = {
        "one": torch.ones(8),
        "two": torch.randn(8),
        "one_bias": torch.zeros(8),
        "two_bias": torch.zeros(8),
    }
    tensors = {"x": torch.randn(5, 8), "a": torch.randn(8, 8), "b": torch.randn(8, 8), **weights}
    (found,), gradients = run(program, tensors)

    def layer_norm(z, name):
        return torch.nn.functional.layer_norm(z, (8,), tensors[name], tensors[name + "_bias"], 1e-5)

    x, a, b = (tensors[name] for name in ("x", "a", "b"))
    expected = layer_norm(x + layer_norm(x + x @ a.t(), "one") @ b.t(), "two")
    torch.testing.assert_close(found, expected)
    leaves = list(gradients)
    for name, wanted in zip(
        leaves, torch.autograd.grad(expected.sum(), [tensors[n] for n in leaves]), strict=True
    ):
        torch.testing.assert_close(gradients[name], wanted, atol=1e-5, rtol=1e-4)


def test_a_gradient_may_pass_through():
    """Without a norm, the gradient of the residual is that of the result."""
    b = builder()
    x, other = b.input("x", (5, 8)), b.input("other", (5, 8))
    update = project(b, other, "weight", (8, 8))
    b.output(
        b.add(ResidualNorm(sum=ResidualSum(residual=x, update=update, z=b.like("z", x)))).sum.z
    )
    tensors = {"x": torch.randn(5, 8), "other": torch.randn(5, 8), "weight": torch.randn(8, 8)}
    _, found = run(b.build(), tensors)
    assert torch.equal(found["x"], torch.ones(5, 8))
    torch.testing.assert_close(found["other"], tensors["weight"].sum(0).expand(5, 8))


def test_a_tensor_and_its_rounded_copy_share_a_gradient():
    b = builder(INT8)
    x = b.input("x", (5, 16))
    made = norm(b, x, out=b.like("out", x), rounded=b.coded("codes", x.shape, "codes_clip"))
    b.output(project(b, made.rounded, "first", (16, 16)))
    b.output(project(b, rounded(b, made.out, "again"), "second", (16, 16)))
    program = b.build()
    _, backward = names(program)
    assert "Add" not in backward
    assert [
        op.added and op.added.name for op in program.operations if op.name == "ProjectInputGradient"
    ] == [None, "d_again.codes"]


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


def test_a_gradient_is_taken_once():
    b = builder()
    x, first, second = b.input("x", (5, 4)), b.tensor("first", (5, 4)), b.tensor("second", (5, 4))
    assert (
        b.take_gradient(x)
        is b.gradient_of(x)
        is b.gradient_of(None)
        is b.gradient_sum(x, None)
        is None
    )
    b.accumulate(x, first)
    assert b.take_gradient(x) is first and b.gradient_of(x) is None
    b.accumulate(x, first)
    b.accumulate(x, second)
    total = b.gradient_of(x)
    assert total not in (first, second) and b.gradient_sum(x) is total
    (add,) = b._operations
    assert (add.a, add.b, add.out) == (first, second, total)


@pytest.mark.parametrize("backward", ["int8", "float"])
def test_the_gradient_of_a_product_is_rounded_or_floats(backward):
    b = builder(QuantConfig(backward=backward))
    y = project(b, rounded(b, b.input("x", (5, 16))), "weight", (16, 16))
    floats, codes = b.product_gradient(y)
    assert (floats is None) == (backward == "int8") and (codes is None) == (backward == "float")
    found = floats if codes is None else codes.codes
    assert (found.name, found.shape) == ("d_y", (5, 16))
    if codes is not None:
        assert (
            codes.scale.shape == (5,) and codes.weight_scale is b.weight("weight", (16, 16)).scale
        )
        assert codes.key is b.key
    assert b.product_gradient_of(y) == (floats, codes) and b.gradient_of(y) is None


def test_what_is_no_product_gets_floats():
    b = builder(INT8)
    x = b.input("x", (5, 16))
    floats, codes = b.product_gradient(x)
    assert codes is None and b.gradient_of(x) is floats
    assert b.product_gradient_of(b.input("other", (1,))) == (None, None)


def test_the_gradient_of_a_bias_belongs_to_its_product():
    b = builder()
    bias = b.parameter("bias", (3,), Kind.BIAS)
    with_bias = project(b, b.input("x", (5, 4)), "weight", (3, 4), bias=bias)
    without = project(b, b.input("x", (5, 4)), "other", (3, 4))
    assert b.bias_gradient(with_bias).name == "d_bias"
    assert (
        b.bias_gradient(without)
        is b.bias_gradient(None)
        is b.bias_gradient(b.input("z", (1,)))
        is None
    )


def test_a_parameter_has_one_reader():
    b = builder()
    x = b.input("x", (5, 4))
    for _ in range(2):
        b.output(project(b, x, "weight", (3, 4)))
    with pytest.raises(ValueError, match="parameter weight has two readers in program tiny"):
        b.build()


def test_a_product_has_one_reader():
    b = builder()
    hidden = project(b, b.input("x", (5, 4)), "weight", (4, 4), result="hidden")
    for name in ("first", "second"):
        b.output(project(b, hidden, name, (3, 4)))
    with pytest.raises(ValueError, match="the product hidden has two readers in program tiny"):
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


def test_a_chain_of_products_keeps_what_is_between_them():
    b = builder()
    hidden = project(b, b.input("x", (5, 4)), "first", (6, 4), result="hidden")
    b.output(project(b, hidden, "second", (3, 6)))
    program = b.build()
    tensors = {"first": torch.randn(6, 4), "second": torch.randn(3, 6), "x": torch.randn(5, 4)}
    (y,), found = run(program, tensors)
    expected = tensors["x"] @ tensors["first"].t() @ tensors["second"].t()
    torch.testing.assert_close(y, expected)
    leaves = list(found)
    for name, wanted in zip(
        leaves, torch.autograd.grad(expected.sum(), [tensors[n] for n in leaves]), strict=True
    ):
        torch.testing.assert_close(found[name], wanted)
    assert [tensor.name for tensor in program.saved] == ["hidden"]
