"""Project on the CPU and on CUDA: exact integers, every end, blocks of rows, accuracy of
activations, NaN."""

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
    refused,
    to_round,
    weight_format_of,
)
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.products import WAYS, assert_same_bits
from tests.ops.tiles import SMALL, names
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


def values_of(operation):
    """y by definition."""
    sums = (operation.x.tensor.long() @ operation.weight.codes.long().t()).float()
    y = sums * (operation.x.scale * operation.weight.scale)
    return y if operation.bias is None else y + operation.bias


@pytest.mark.parametrize("rows", [0, *ROWS, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 6])
@pytest.mark.parametrize("bits", [8, 3])
def test_codes_are_exact(rows, bits):
    found = compare(rounded_project(rows, bits=bits))
    clip = torch.tensor([0.7])
    codes, scale, clipped, error = arithmetic.round_activation(
        values_of(found), clip, bits=bits, error=True
    )
    assert torch.equal(found.rounded.codes, codes) and torch.equal(found.rounded.scale, scale)
    assert torch.equal(found.rounded.clipped, clipped) and torch.equal(found.rounded.error, error)
    assert rows < 7 or clipped.any()


@pytest.mark.parametrize("rows", [0, *ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("activation", [Activation.none, Activation.relu, Activation.squared_relu])
@pytest.mark.parametrize("error", [False, True])
def test_a_scale_for_each_row(rows, activation, error):
    found = compare(
        rounded_project(rows, activation=activation, error=error, **operands_by_row(rows))
    )
    scale = found.x.coded.scale.double()[:, None] * found.weight.scale.double()
    exact = PLAIN[activation](
        (found.x.tensor.double() @ found.weight.codes.double().t()) * scale + found.bias
    )
    torch.testing.assert_close(found.unrounded(run).double(), exact, rtol=1e-5, atol=1e-5)
    floats = compare(Project(**operands_by_row(rows), out=empty(rows, 32)))
    torch.testing.assert_close(floats.out, values_of(floats))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "bias, error", [(True, True), (False, True), (True, False), (False, False)]
)
def test_every_end_of_codes(activation, dropout, bias, error):
    given = {} if bias else {"bias": None}
    found = compare(rounded_project(41, 88, activation, dropout, error=error, **given))
    y = values_of(found)
    result = dropped(PLAIN[activation](y), dropout_of(dropout))
    torch.testing.assert_close(found.unrounded(run), result)
    if activation not in SMOOTH:
        codes, scale, clipped, _ = arithmetic.round_activation(
            result, torch.tensor([0.7]), bits=8, error=False
        )
        assert torch.equal(found.rounded.codes, codes) and torch.equal(found.rounded.scale, scale)
        assert torch.equal(found.rounded.clipped, clipped) and clipped.any()
    if activation is Activation.relu:
        assert torch.equal(found.nonlinearity.positive, quant.pack_bits(y > 0))
    if activation in SMOOTH:
        slope = slope_by_autograd(activation, y.double())
        assert ((found.nonlinearity.slope / SLOPE_UNIT - slope).abs() <= 0.5001 / SLOPE_UNIT).all()


def slope_by_autograd(activation, y):
    leaf = y.clone().requires_grad_()
    return torch.autograd.grad(PLAIN[activation](leaf).sum(), leaf)[0]


@pytest.mark.parametrize("rows", [0, 7, 41])
def test_floats_of_codes(rows):
    found = compare(Project(**operands(rows), out=empty(rows, 32)))
    assert torch.equal(found.out, values_of(found))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows, outputs", [(0, 33), (1, 33), (41, 33), (13, 1), (7, 48)])
def test_products_of_floats(activation, dropout, rows, outputs):
    """Rows of 33 do not begin at a byte of the packed bits."""
    found = compare(float_project(rows, outputs, activation, dropout))
    y = found.x.floats @ found.weight.values.t() + found.bias
    torch.testing.assert_close(
        found.out, dropped(PLAIN[activation](y), dropout_of(dropout)), atol=2e-6, rtol=1e-5
    )
    if activation is Activation.relu:
        assert torch.equal(found.nonlinearity.positive, quant.pack_bits(y > 0))
    elif activation is not Activation.none:
        assert torch.equal(found.nonlinearity.before, y)


def test_a_product_without_an_end():
    found = compare(float_project(41, bias=None))
    assert torch.equal(found.out, found.x.floats @ found.weight.values.t())


def through(x, activation):
    """The result of an activation of x [N]: the product of 1 and a weight."""
    weight = Weight(format=weight_format_of(), values=x[:, None].contiguous())
    return float_project(
        1, len(x), activation, x=Rows(floats=torch.ones(1, 1)), weight=weight, bias=None
    )


@pytest.mark.parametrize("activation", list(Activation)[1:])
def test_values_are_as_accurate_as_torchs(activation):
    """Around 0, where GELU bends, and far out on both sides."""
    x = torch.cat(
        [
            torch.linspace(-12, 12, 4801),
            torch.randn(4000),
            torch.tensor([-90.0, 90.0, -1e-6, 1e-20, 0.0]),
        ]
    )
    assert_accurate(
        on_cpu(through(x, activation)).out[0], PLAIN[activation](x.double()), PLAIN[activation](x)
    )


@pytest.mark.parametrize("activation", SMOOTH)
def test_far_out(activation):
    x = torch.tensor([1e30, -1e30, 3e38, -3e38, math.inf, 100.0, -100.0])
    found = on_cpu(through(x, activation)).out[0]
    assert (
        torch.equal(found[[0, 2, 4, 5]], x[[0, 2, 4, 5]]) and found[[1, 3, 6]].abs().max() < 1e-35
    )


@pytest.mark.parametrize("poisoned", ["input", "weight", "bias"])
@pytest.mark.parametrize("activation", Activation)
def test_nan_poisons_the_result(poisoned, activation):
    operation = rounded_project(BLOCK_ROWS + 9, activation=activation, error=False)
    place = {"input": operation.x.scale, "weight": operation.weight.scale, "bias": operation.bias}[
        poisoned
    ]
    place[0] = math.nan
    found = compare(operation)
    assert found.rounded.scale.isnan() and not found.rounded.codes[:, 0].any()
    assert activation not in SMOOTH or not found.nonlinearity.slope[:, 0].any()


@pytest.mark.parametrize("row, error", [(0, True), (BLOCK_ROWS + 8, True), (BLOCK_ROWS + 8, False)])
def test_nan_in_any_block_of_rows_poisons_the_scale(row, error):
    """Of sums nothing is NaN by itself, so that the factor is infinite, which makes NaN of a sum of
    0."""
    operation = rounded_project(BLOCK_ROWS + 9, bias=None, error=error)
    operation.x.tensor[:, 0] = operation.weight.codes[:, 0] = 1
    operation.x.tensor[:, 1:] = 0
    operation.x.tensor[row] = 0
    operation.weight.scale[3] = math.inf
    found = compare(operation)
    assert (
        found.rounded.scale.isnan()
        and found.rounded.codes[1, 3] == 127
        and found.rounded.codes[row, 3] == 0
    )


def test_an_end_that_nothing_undoes_is_refused():
    b = builder()
    end = Nonlinearity(
        activation=Activation.relu, positive=b.tensor("positive", (14,), torch.uint8)
    )
    x, weight = b.input("x", (7, 16)), b.weight("weight", (16, 16))
    out = b.tensor("y", (7, 16))
    b.add(Project(x=Rows(floats=x), weight=weight, out=out, nonlinearity=end))
    b.output(out)
    with refused("the gradient of y comes from outside"):
        b.build()


def test_largest_sums_are_exact():
    given = operands(41, inner=2048)
    given["x"].tensor.fill_(127)
    given["weight"].codes.fill_(-127)
    found = compare(Project(**given | {"bias": None}, out=empty(41, 32)))
    assert torch.equal(
        found.out, float(-2048 * 127**2) * (found.x.scale * found.weight.scale).expand(41, 32)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", list(Activation))
def test_no_way_to_multiply_changes_a_bit(way, activation):
    assert_same_bits(
        rounded_project(141, activation=activation, dropout=0.2, bias=torch.randn(32)), way
    )


@pytest.fixture(params=["one launch", "cuBLASLt and a kernel"])
def way(request):
    """Both ways to a product of codes and its end."""
    with gemm.ended_by(SMALL if request.param == "one launch" else None):
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "rows, outputs, bits", [*((rows, 32, 8) for rows in (0, *ROWS)), (41, 272, 3)]
)
def test_codes_are_exact_on_cuda(rows, outputs, bits):
    found = compare_cuda(rounded_project(rows, outputs, bits=bits), exact=True)
    assert torch.equal(found.rounded.scale, found.rounded.clip / found.rounded.largest)
    assert rows < 7 or found.rounded.clipped.any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_every_end_of_codes_on_cuda(activation, dropout, bias):
    compare_cuda(
        rounded_project(41, 48, activation, dropout, **({} if bias else {"bias": None})), exact=True
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", [Activation.none, Activation.gelu])
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_a_scale_for_each_row_is_exact_on_cuda(activation, rows):
    compare_cuda(rounded_project(rows, 32, activation, **operands_by_row(rows)), exact=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 41])
@pytest.mark.parametrize("given", [operands, operands_by_row])
def test_floats_of_codes_on_cuda(dtype, rows, given):
    compare_cuda(Project(**given(rows), out=empty(rows, 32)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_products_of_floats_on_cuda(dtype, activation, rows):
    compare_cuda(float_project(rows, 48, activation, 0.3 if rows > 1 else 0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_without_an_end_on_cuda(dtype):
    compare_cuda(float_project(41, 33, bias=None), dtype)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("poisoned", ["input", "weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_poisons_the_result_on_cuda(poisoned, value):
    """An infinite scale makes NaN of a sum of 0."""
    operation = rounded_project(41)
    operation.x.tensor[3] = 0
    (operation.x.scale if poisoned == "input" else operation.weight.scale)[0] = value
    assert compare_cuda(operation, exact=True).rounded.scale.isnan()


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
