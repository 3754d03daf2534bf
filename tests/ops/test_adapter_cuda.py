"""Low-rank adapters on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest

from lsq.ops.nonlinearity import Activation
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_adapter import (
    KINDS,
    SIZES,
    adapt,
    adapt_gradient,
    adapt_with_end,
    adapter_input,
    adapter_input_gradient,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [(0, 16), (41, 48)])
def test_what_adapters_read(rows, columns, kind, dropout, dtype):
    compare_cuda(adapter_input(rows, columns, kind, dropout), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("rows, dropout", [(0, 0.3), (41, 0.0), (41, 0.3)])
def test_what_goes_back(rows, dropout, added, dtype):
    compare_cuda(adapter_input_gradient(rows, 48, dropout, added=added), dtype)


def test_widths_that_no_kernel_takes():
    with pytest.raises(ValueError, match="the width of an adapter's input is 12"):
        adapter_input(3, 12, "codes").cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_products(sizes, dtype):
    compare_cuda(adapt(*sizes), dtype)
    compare_cuda(adapt_gradient(*sizes), dtype)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows", [0, 41])
def test_it_ends_as_a_product(rows, activation, dropout):
    compare_cuda(
        adapt_with_end(rows, 72, activation, dropout, coded=True, error=not dropout), exact=True
    )
    for dtype in DTYPES:
        compare_cuda(adapt_with_end(rows, 72, activation, dropout, coded=False), dtype)


def test_nan_poisons_the_result():
    operation = adapt_with_end(41, 72, Activation.relu, coded=True)
    operation.base[40, 71] = math.nan
    assert compare_cuda(operation, exact=True).rounded.scale.isnan()
