"""Project: exact integers, every end, blocks of rows, accuracy of activations, NaN."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from lsq import gemm, quant
from lsq.ops.nonlinearity import SLOPE_UNIT, Activation, Nonlinearity
from lsq.ops.project import Project
from lsq.program.values import Coded, Rows, Weight, dropped
from lsq.quant import arithmetic
from lsq.run.backends import run
from tests.ops.compare import (
    ROWS,
    assert_accurate,
    by_row,
    compare,
    dropout_of,
    empty,
    format_of,
    on_cpu,
    on_reference,
    refused,
    to_round,
    weight_format_of,
)
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.products import WAYS, assert_same_bits
from tests.ops.tiles import names
from tests.program.tiny import builder

BLOCK_ROWS = 512
PLAIN = {
    Activation.none: lambda x: x,
    Activation.relu: torch.relu,
    Activation.gelu: functional.gelu,
    Activation.gelu_tanh: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.silu: functional.silu,
    Activation.squared_relu: lambda x: torch.relu(x) ** 2,
}
SMOOTH = [Activation.gelu, Activation.gelu_tanh, Activation.silu]
"""Whose slope is kept as an int8."""


def operands(rows, inner=48, outputs=32):
    """Codes of an input and of a weight, and a bias: products of about unit magnitude."""
    x, weight = (torch.randint(-127, 128, (n, inner), dtype=torch.int8) for n in (rows, outputs))
    scale = 2e-4 * (1 + torch.rand(outputs))
    return {
        "x": Rows(coded=Coded(format=format_of(), codes=x, scale=torch.tensor([0.1]))),
        "weight": Weight(format=weight_format_of(), codes=weight, scale=scale),
        "bias": torch.randn(outputs),
    }


def operands_by_row(rows, inner=48, outputs=32):
    """The same with a scale for each row of the input."""
    found = operands(rows, inner, outputs)
    return found | {"x": Rows(coded=by_row(found["x"].coded))}


def float_operands(rows, inner=48, outputs=33):
    """Whole numbers, so that products are exact in every dtype."""
    floats, weight = (torch.randint(-1, 2, (n, inner)).float() for n in (rows, outputs))
    weight = Weight(format=weight_format_of(), values=weight)
    return {"x": Rows(floats=floats), "weight": weight, "bias": torch.randn(outputs)}


def nonlinearity(activation, dropout, rows, columns, *, coded):
    """An activation with what is kept for the backward pass, and dropout."""
    found = Nonlinearity(activation=activation, dropout=dropout_of(dropout))
    if activation is Activation.relu:
        found.positive = empty(-(-rows * columns // 8), dtype=torch.uint8)
    elif activation in SMOOTH and coded:
        found.slope = empty(rows, columns, dtype=torch.int8)
    elif activation is not Activation.none:
        found.before = empty(rows, columns)
    return found if dropout or activation is not Activation.none else None


def rounded_project(
    rows, outputs=32, activation=Activation.none, dropout=0.0, *, bits=8, error=True, **given
):
    """A product of codes whose result is rounded."""
    return Project(
        **operands(rows, outputs=outputs) | given,
        rounded=to_round(rows, outputs, 0.7, bits=bits, error=error),
        nonlinearity=nonlinearity(activation, dropout, rows, outputs, coded=True),
    )


def float_project(rows, outputs=33, activation=Activation.none, dropout=0.0, **given):
    """A product of floats."""
    return Project(
        **float_operands(rows, outputs=outputs) | given,
        out=empty(rows, outputs),
        nonlinearity=nonlinearity(activation, dropout, rows, outputs, coded=False),
    )


def slope_by_autograd(activation, y):
    leaf = y.clone().requires_grad_()
    return torch.autograd.grad(PLAIN[activation](leaf).sum(), leaf)[0]


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("given", [operands, operands_by_row])
def test_the_reference_is_the_definition(activation, dropout, given):
    found = on_reference(rounded_project(41, 88, activation, dropout, **given(41, outputs=88)))
    y = found.x.tensor.double() @ found.weight.codes.double().t()
    y = y * (found.x.scale.double() * found.weight.scale.double()) + found.bias
    result = dropped(PLAIN[activation](y.float()), dropout_of(dropout))
    codes, *_ = arithmetic.round_activation(result, torch.tensor([0.7]), bits=8, error=False)
    assert (found.rounded.codes != codes).sum() < 4
    torch.testing.assert_close(found.unrounded(run), result, rtol=1e-5, atol=1e-5)
    if activation is Activation.relu:
        assert torch.equal(found.nonlinearity.positive, quant.pack_bits(y > 0))
    if activation in SMOOTH:
        error = found.nonlinearity.slope / SLOPE_UNIT - slope_by_autograd(activation, y)
        assert (error.abs() <= 0.5001 / SLOPE_UNIT).all()


@pytest.mark.parametrize("rows", [0, *ROWS, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 6])
@pytest.mark.parametrize("outputs, bits", [(32, 8), (272, 3)])
def test_codes_are_exact(rows, outputs, bits, same_codes):
    found = same_codes(rounded_project(rows, outputs, bits=bits)).rounded
    assert rows < 7 or found.clipped.any()


@pytest.mark.parametrize("rows", [0, *ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("activation", [Activation.none, Activation.gelu, Activation.squared_relu])
@pytest.mark.parametrize("error", [False, True])
def test_a_scale_for_each_row(rows, activation, error, compared):
    given = operands_by_row(rows)
    compared(rounded_project(rows, 32, activation, error=error, **given), exact=True)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "bias, error", [(True, True), (False, True), (True, False), (False, False)]
)
def test_every_end_of_codes(activation, dropout, bias, error, where, compared, same_codes):
    given, outputs = {} if bias else {"bias": None}, 88 if where == "cpu" else 48
    operation = rounded_project(41, outputs, activation, dropout, error=error, **given)
    found = compared(operation, exact=True) if activation in SMOOTH else same_codes(operation)
    assert found.rounded.clipped.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 7, 41])
@pytest.mark.parametrize("given", [operands, operands_by_row])
def test_floats_of_codes(dtype, rows, given, where, compared):
    operation = Project(**given(rows), out=empty(rows, 32))
    found = compared(operation, dtype)
    assert where != "cpu" or torch.equal(found.out, on_reference(operation).out)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows, outputs", [(0, 33), (1, 33), (41, 33), (13, 1), (7, 48)])
def test_products_of_floats(activation, dropout, rows, outputs):
    """Rows of 33 do not begin at a byte of the packed bits."""
    compare(float_project(rows, outputs, activation, dropout), exact=True)


@pytest.mark.parametrize("rows", [0, *ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("given", [operands, operands_by_row])
def test_a_factor_of_each_row(rows, given, same_codes, compared):
    given = {**given(rows), "bias": None, "row_factor": 0.2 + torch.rand(rows)}
    same_codes(Project(**given, rounded=to_round(rows, 32, 0.7)))
    found = compared(Project(**given, out=empty(rows, 32)))
    y = found.x.tensor.double() @ found.weight.codes.double().t()
    factor = found.x.scale.double() * found.weight.scale.double() * found.row_factor[:, None]
    torch.testing.assert_close(found.out.double(), y * factor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 41])
def test_a_factor_of_each_row_of_floats(rows):
    given = {"bias": None, "row_factor": 0.2 + torch.rand(rows)}
    found = compare(float_project(rows, **given), exact=True)
    expected = found.x.floats.double() @ found.weight.values.double().t()
    expected *= found.row_factor.double()[:, None]
    torch.testing.assert_close(found.out.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_factor_of_each_row_beside_a_bias_is_refused():
    with refused("a product with row_factor has a bias"):
        Project(**operands(7), row_factor=torch.ones(7), out=empty(7, 32))


def test_a_product_without_an_end():
    found = compare(float_project(41, bias=None))
    assert torch.equal(found.out, found.x.floats @ found.weight.values.t())


def through(x, activation):
    """The result of an activation of x [N]: the product of 1 and a weight."""
    weight = Weight(format=weight_format_of(), values=x[:, None].contiguous())
    given = {"x": Rows(floats=torch.ones(1, 1)), "weight": weight, "bias": None}
    return float_project(1, len(x), activation, **given)


@pytest.mark.parametrize("activation", list(Activation)[1:])
def test_values_are_as_accurate_as_torchs(activation):
    """Around 0, where GELU bends, and far out on both sides."""
    edges = torch.tensor([-90.0, 90.0, -1e-6, 1e-20, 0.0])
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.randn(4000), edges])
    found, plain = on_cpu(through(x, activation)).out[0], PLAIN[activation]
    assert_accurate(found, plain(x.double()), plain(x))


@pytest.mark.parametrize("activation", SMOOTH)
def test_far_out(activation):
    x = torch.tensor([1e30, -1e30, 3e38, -3e38, math.inf, 100.0, -100.0])
    found = on_cpu(through(x, activation)).out[0]
    assert torch.equal(found[[0, 2, 4, 5]], x[[0, 2, 4, 5]])
    assert found[[1, 3, 6]].abs().max() < 1e-35


POISONED = [(*one, math.nan) for one in itertools.product(("input", "weight", "bias"), Activation)]


@pytest.mark.parametrize(
    "poisoned, activation, value", [*POISONED, ("weight", Activation.none, math.inf)]
)
def test_nan_poisons_the_result(poisoned, activation, value, where, compared):
    """An infinite scale makes NaN of a sum of 0."""
    rows = BLOCK_ROWS + 9 if where == "cpu" else 41
    operation = rounded_project(rows, activation=activation, error=False)
    tensors = {"input": operation.x, "weight": operation.weight}
    operation.x.tensor[3] = 0
    (operation.bias if poisoned == "bias" else tensors[poisoned].scale)[0] = value
    found = compared(operation, exact=True)
    assert found.rounded.scale.isnan() and not found.rounded.codes[3, 0]
    assert activation not in SMOOTH or not found.nonlinearity.slope[3, 0]


@pytest.mark.parametrize("row, error", [(0, True), (BLOCK_ROWS + 8, True), (BLOCK_ROWS + 8, False)])
def test_nan_in_any_block_of_rows_poisons_the_scale(row, error):
    """Sums are never NaN; an infinite factor makes NaN of a sum of 0."""
    operation = rounded_project(BLOCK_ROWS + 9, bias=None, error=error)
    operation.x.tensor[:, 0] = operation.weight.codes[:, 0] = 1
    operation.x.tensor[:, 1:] = 0
    operation.x.tensor[row] = 0
    operation.weight.scale[3] = math.inf
    found = compare(operation).rounded
    assert found.scale.isnan() and found.codes[1, 3] == 127 and found.codes[row, 3] == 0


def test_an_end_that_nothing_undoes_is_refused():
    b = builder()
    positive = b.tensor("positive", (14,), torch.uint8)
    end = Nonlinearity(activation=Activation.relu, positive=positive)
    x, weight = b.input("x", (7, 16)), b.weight("weight", (16, 16))
    out = b.tensor("y", (7, 16))
    b.add(Project(x=Rows(floats=x), weight=weight, out=out, nonlinearity=end))
    b.output(out)
    with refused("the gradient of y comes from outside"):
        b.build()


def test_a_factor_of_rows_that_no_sums_undo_is_refused():
    b = builder()
    x, factor = b.input("x", (7, 16)), b.input("factor", (7,))
    weights = [b.weight(name, (16, 16)) for name in ("first", "second")]
    y, z = b.tensor("y", (7, 16)), b.tensor("z", (7, 16))
    b.add(Project(x=Rows(floats=x), weight=weights[0], out=y, row_factor=factor))
    b.add(Project(x=Rows(floats=y), weight=weights[1], out=z))
    b.output(z)
    with refused("y has a row_factor, which only the gradient of an Aggregate undoes"):
        b.build()


def test_largest_sums_are_exact():
    given = operands(41, inner=2048)
    given["x"].tensor.fill_(127)
    given["weight"].codes.fill_(-127)
    found = compare(Project(**given | {"bias": None}, out=empty(41, 32)))
    scale = (found.x.scale * found.weight.scale).expand(41, 32)
    assert torch.equal(found.out, float(-2048 * 127**2) * scale)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", list(Activation))
def test_no_way_to_multiply_changes_a_bit(way, activation):
    assert_same_bits(rounded_project(141, activation=activation, dropout=0.2), way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_products_of_floats_on_cuda(dtype, activation, rows):
    compare_cuda(float_project(rows, 48, activation, 0.3 if rows > 1 else 0.0), dtype)
    compare_cuda(float_project(rows, 33, bias=None), dtype)
    factor = 0.2 + torch.rand(rows)
    compare_cuda(float_project(rows, 48, bias=None, row_factor=factor), dtype)


def test_widths_that_no_product_takes_are_refused_on_cuda():
    with refused("inner width of an int8 product is 40.*multiple of 16"):
        compare_cuda(Project(**operands(7, inner=40), out=empty(7, 32)))
    with refused("width of a product with an end is 33.*multiple of 8"):
        compare_cuda(float_project(7, 33))


def test_one_launch_without_scratch_or_a_product_and_its_end_on_cuda():
    operation = Project(**operands(41), out=empty(41, 32))
    assert names(operation.cuda()) == ["lsq_project_product"] and not operation.cuda_scratch()
    with gemm.ended_by(None):
        ((shape, dtype),) = operation.cuda_scratch()
        multiplied, end = operation.cuda(torch.empty(shape, dtype=dtype))
    assert (shape, dtype) == ((41, 32), torch.int32)
    assert multiplied.op == "project" and end.kernel.name == "lsq_end"
