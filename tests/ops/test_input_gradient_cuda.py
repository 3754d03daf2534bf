"""ProjectInputGradient on CUDA: one product and one kernel on its rows, in the emulator or on a
GPU."""

import math

import pytest
import torch

from lsq import gemm
from lsq.native import geometry
from lsq.ops.nonlinearity import Activation
from tests.ops.compare import on_cpu
from tests.ops.cuda import compare_cuda, in_dtype, run
from tests.ops.test_input_gradient import MODES, case, check_accumulated_in_place
from tests.ops.tiles import SMALL, in_one

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def products_by_themselves():
    """Kernels that make them as well: test_input_gradient_product_cuda.py."""
    with gemm.ended_by(None):
        yield


ENDS = [
    {"kind": Activation.none, "learned_step": True},
    {"kind": Activation.relu, "dropout": 0.3, "added": True},
    {"kind": Activation.gelu, "dropout": 0.1, "clips": 1},
    {"kind": Activation.gelu_tanh},
    {"kind": Activation.silu},
    {"kind": Activation.squared_relu, "dropout": 0.1},
    {"dropout": 0.3, "accumulated": True, "added": True},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ENDS)
def test_every_end(mode, end):
    operation, _ = case(41, mode, **end)
    found = compare_cuda(operation)
    if mode == "int8":
        assert torch.equal(found.dx, on_cpu(operation).dx)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows", [1, 341])
def test_int8_products(end, rounded, rows):
    operation, _ = case(rows, rounded=rounded, **end)
    compare_cuda(operation, exact=True)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", ["int8", "float"])
def test_gradients_in_half_precision(mode, end):
    """The product is one of float32 or of codes all the same."""
    operation, _ = case(41, mode, **end)
    compare_cuda(operation, HALF)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", ["float", "float mode"])
@pytest.mark.parametrize("activations", [torch.float32, HALF])
def test_products_in_half_precision(mode, end, activations):
    """Operands are rounded, and so is the product where activations have its dtype."""
    operation, _ = case(41, mode, dtype="bfloat16", **end)
    exact_of, found = (
        on_cpu(in_dtype(in_dtype(operation, HALF), torch.float32)),
        run(in_dtype(operation, activations)),
    )
    assert found.dx.dtype == activations
    for name in ("dx", "sum"):
        one, exact = getattr(found, name).float(), getattr(exact_of, name)
        assert (one - exact).norm() <= 0.01 * exact.norm(), name


def test_a_weight_that_comes_transposed():
    """It is not transposed again."""
    operation, _ = case(41, kind=Activation.relu, rounded=True)
    expected = run(operation).rounded
    operation.weight.transposed = operation.weight.codes.t().contiguous()
    found = run(operation).rounded
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)
    assert all(shape != operation.weight.transposed.shape for shape, _ in operation.cuda_scratch())


def test_rounded_rows_of_a_product_of_floats():
    """No activation is read or written but the gradient."""
    operation, _ = case(41, "float", kind=Activation.relu, rounded=True)
    compare_cuda(operation)


@pytest.mark.parametrize("rounded", [False, True])
def test_wide_rows(rounded):
    """More columns than a warp and a tile hold."""
    operation, _ = case(11, kind=Activation.relu, dropout=0.2, rounded=rounded, columns=1040)
    compare_cuda(operation, exact=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounded", [False, True])
def test_an_empty_batch(mode, rounded):
    operation, _ = case(
        0, mode, kind=Activation.relu, dropout=0.1, learned_step=True, added=True, rounded=rounded
    )
    found = compare_cuda(operation)
    assert not found.sum.any() and not found.dclip.any()


@pytest.mark.parametrize("row", [0, 20, 40])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_row_that_is_not_finite_stays_alone(row, rounded, monkeypatch):
    few_blocks(monkeypatch)
    operation, _ = case(41, kind=Activation.relu, dropout=0.2, added=True, rounded=rounded)
    operation.gradient.scale[row] = math.nan
    found = compare_cuda(operation, exact=True)
    lost = found.rounded.scale.isnan() if rounded else found.dx.isnan().any(1)
    assert lost.nonzero().tolist() == [[row]]


def test_results_that_nobody_wants():
    operation, _ = case(41, rounded=True, rest=False)
    compare_cuda(operation, exact=True)


def few_blocks(monkeypatch):
    """Two blocks stride over 41 rows in three turns."""
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(2, turns)))


@pytest.mark.parametrize("rows, columns", [(41, 48), (11, 1040)])
@pytest.mark.parametrize("rounded", [False, True])
def test_three_turns(rows, columns, rounded, monkeypatch):
    few_blocks(monkeypatch)
    turns(rows, columns, rounded)


def turns(rows, columns, rounded):
    operation, _ = case(
        rows, kind=Activation.relu, dropout=0.1, learned_step=True, rounded=rounded, columns=columns
    )
    in_one(operation, None)


def test_widths_that_kernels_cannot_take():
    operation, _ = case(7, columns=40)
    with pytest.raises(ValueError, match="multiple of 16"):
        run(operation)


@pytest.mark.parametrize("tile", [None, SMALL])
def test_accumulated_in_place(tile):
    with gemm.ended_by(tile):
        check_accumulated_in_place(run, learned_step=False)
