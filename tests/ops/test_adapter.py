"""Low-rank adapters, against plain PyTorch in float64, on the CPU and on CUDA."""

import math

import pytest
import torch

from lsq.ops.adapter import Adapt, AdapterInput, AdapterInputGradient, AdaptGradient
from lsq.ops.nonlinearity import Activation
from lsq.program.values import Rows, dropped
from lsq.run.backends import run
from tests.ops.compare import (
    assert_as_accurate,
    by_row,
    compare,
    dropout_of,
    empty,
    on_reference,
    refused,
    rounded,
    to_round,
)
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_project import nonlinearity

SIZES = [(41, 48, 72, 6), (1, 16, 8, 1), (130, 24, 40, 16)]
KINDS = ["codes", "codes by row", "floats"]


def rows_of(kind: str, rows: int, columns: int) -> Rows:
    """What a product reads."""
    if kind == "floats":
        return Rows(floats=torch.randn(rows, columns).bfloat16().float())
    coded = rounded(rows, columns).bare()
    return Rows(coded=by_row(coded) if kind == "codes by row" else coded)


def adapter_input(rows: int, columns: int, kind: str, dropout: float = 0.0) -> AdapterInput:
    x = rows_of(kind, rows, columns)
    return AdapterInput(x=x, dropout=dropout_of(dropout), values=empty(rows, columns))


def adapter_input_gradient(
    rows: int, columns: int, dropout: float = 0.0, *, added: bool = True
) -> AdapterInputGradient:
    more = torch.randn(rows, columns).bfloat16().float() if added else None
    given = {"gradient": torch.randn(rows, columns), "dropout": dropout_of(dropout)}
    return AdapterInputGradient(**given, added=more, dx=empty(rows, columns))


def adapt(rows: int, inputs: int, outputs: int, rank: int) -> Adapt:
    return Adapt(
        x=rows_of("codes", rows, inputs),
        values=torch.randn(rows, inputs),
        down=torch.randn(rank, inputs),
        up=torch.randn(outputs, rank),
        base=torch.randn(rows, outputs).bfloat16().float(),
        out=empty(rows, outputs),
        hidden=empty(rows, rank),
    )


def adapt_with_end(
    rows: int, outputs: int, activation, dropout: float = 0.0, *, coded: bool, error=False
) -> Adapt:
    """Of whole numbers, so that sums are exact in every order."""
    operation = adapt(rows, 48, outputs, 6)
    for name in ("values", "down", "up"):
        setattr(operation, name, getattr(operation, name).clamp(-1, 1).round())
    if coded:
        operation.out, operation.rounded = None, to_round(rows, outputs, 4.0, error=error)
    operation.nonlinearity = nonlinearity(activation, dropout, rows, outputs, coded=coded)
    return operation


def adapt_gradient(*sizes: int) -> AdaptGradient:
    return gradient_of(on_reference(adapt(*sizes)))


def gradient_of(forward: Adapt) -> AdaptGradient:
    """Of adapters that ran."""
    read = {name: getattr(forward, name) for name in ("values", "hidden", "down", "up")}
    written = {f"d{name}": empty(*read[name].shape) for name in ("values", "down", "up")}
    gradient = torch.randn(forward.out.shape).bfloat16().float()
    return AdaptGradient(gradient=gradient, **read, **written)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [(0, 16), (1, 8), (41, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_adapters_read(rows, columns, kind, dropout, dtype, compared):
    operation = adapter_input(rows, columns, kind, dropout)
    found, x = compared(operation, dtype).values, operation.x
    exact = x.floats if x.coded is None else x.coded.codes * x.scale
    kept = found != 0
    torch.testing.assert_close(found[kept], (exact / (1 - dropout))[kept])
    if rows > 1:
        assert abs((~kept & (exact != 0)).float().mean() - dropout) < 0.05


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows, columns", [(0, 16), (41, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_back(rows, columns, dropout, added, dtype, compared):
    compared(adapter_input_gradient(rows, columns, dropout, added=added), dtype)


def test_going_back_drops_the_same():
    forward = compare(adapter_input(41, 48, "floats", 0.3))
    backward = compare(adapter_input_gradient(41, 48, 0.3, added=False))
    assert torch.equal(forward.values != 0, backward.dx != 0)


def by_torch(operation: Adapt, gradient: torch.Tensor, dtype: torch.dtype):
    """(result, gradients of down, up and values)."""
    given = operation.down, operation.up, operation.values
    down, up, values = leaves = [one.to(dtype).requires_grad_() for one in given]
    out = operation.base.to(dtype) + values @ down.t() @ up.t()
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.to(dtype))


@pytest.mark.parametrize("sizes", SIZES)
def test_as_accurate_as_torch(sizes):
    forward = compare(adapt(*sizes))
    backward = compare(gradient_of(forward))
    found = forward.out, backward.ddown, backward.dup, backward.dvalues
    assert_as_accurate(found, lambda dtype: by_torch(forward, backward.gradient, dtype))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "rows, outputs, coded", [(0, 40, True), (41, 40, True), (41, 40, False), (7, 33, False)]
)
def test_it_ends_as_a_product(rows, outputs, coded, activation, dropout):
    """Rows of 33 do not begin at a byte of the packed bits."""
    options = {"coded": coded, "error": not dropout}
    exact = activation in (Activation.none, Activation.relu)
    found = compare(adapt_with_end(rows, outputs, activation, dropout, **options), exact=exact)
    sums = found.base + found.values @ found.down.t() @ found.up.t()
    result = dropped(activation.values(sums), dropout_of(dropout))
    floats = found.unrounded(run) if coded else found.out
    torch.testing.assert_close(floats, result, rtol=1e-5, atol=2e-6)
    assert not coded or not rows or found.rounded.clipped.any()


@pytest.mark.parametrize("wanted", ["ddown", "dup", "dvalues"])
def test_one_gradient_alone(wanted):
    operation = adapt_gradient(7, 16, 8, 2)
    every = compare(operation)
    for name in {"ddown", "dup", "dvalues"} - {wanted}:
        setattr(operation, name, None)
    torch.testing.assert_close(getattr(compare(operation), wanted), getattr(every, wanted))


def test_widths_that_no_kernel_takes_on_cuda():
    with refused("the width of an adapter's input is 12"):
        adapter_input(3, 12, "codes").cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_on_cuda(sizes, dtype):
    compare_cuda(adapt(*sizes), dtype)
    compare_cuda(adapt_gradient(*sizes), dtype)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows", [0, 41])
def test_it_ends_as_a_product_on_cuda(rows, activation, dropout):
    options = {"coded": True, "error": not dropout}
    compare_cuda(adapt_with_end(rows, 72, activation, dropout, **options), exact=True)
    for dtype in DTYPES:
        compare_cuda(adapt_with_end(rows, 72, activation, dropout, coded=False), dtype)


def test_nan_poisons_the_result_on_cuda():
    operation = adapt_with_end(41, 72, Activation.relu, coded=True)
    operation.base[40, 71] = math.nan
    assert compare_cuda(operation, exact=True).rounded.scale.isnan()
