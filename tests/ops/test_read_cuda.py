"""read_product and its gradient, append_time and add on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from tests.ops.compare import KEY
from tests.ops.cuda import compare_cuda
from tests.ops.operands import DTYPES, KINDS, clipped_bits, product_in

SHAPES = [(1, 48), (7, 48), (41, 48), (341, 48), (7, 1040)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_kind_of_product(dtype, kind, biased):
    y, scale = product_in(dtype, kind, 41, 48)
    compare_cuda("read_product", y, scale, torch.randn(48) if biased else None, dtype=dtype, floats=(0,), bits=8)


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_values(rows, columns):
    y, scale = product_in(torch.float32, "int32", rows, columns)
    (found,) = compare_cuda("read_product", y, scale, None, bits=8)
    assert torch.equal(found, y * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 91, 32770])
def test_rows_of_any_width(dtype, kind, columns):
    y, scale = product_in(dtype, kind, 7, columns)
    compare_cuda("read_product", y, scale, torch.randn(columns), dtype=dtype, floats=(0,), bits=8)


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("clipped, error", [(False, False), (True, False), (True, True)])
def test_gradients(rows, columns, rounded, clipped, error):
    compare_gradients(torch.float32, rows, columns, rounded, clipped, error)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rounded", [False, True])
def test_gradients_in_half_precision(dtype, rounded):
    compare_gradients(dtype, 41, 48, rounded, True, True)


def compare_gradients(dtype, rows, columns, rounded, clipped, error, gradient=None):
    y = product_in(dtype, "int8", rows, columns)[0] if clipped else None
    return compare_cuda(
        "read_product_backward", torch.randn(rows, columns).to(dtype) if gradient is None else gradient, y,
        clipped_bits(y) if clipped else None, torch.rand(rows, columns) - 0.5 if error else None,
        torch.rand(columns) if rounded else None, KEY, dtype=dtype, floats=() if rounded else (0,), exact=True,
        bits=8, bias=rows != 7, **({"gradient_stream": 4} if rounded else {}),
    )


@pytest.mark.parametrize("value, scale", [(math.nan, math.nan), (math.inf, math.nan), (0.0, 0.0)])
def test_rows_that_cannot_be_scaled(value, scale):
    gradient = torch.randn(7, 48)
    gradient[3] = value
    _, row_scale, *_ = compare_gradients(torch.float32, 7, 48, True, False, False, gradient)
    assert row_scale[3].item() == scale or (row_scale[3].isnan() and math.isnan(scale))
    assert row_scale.isfinite().sum() >= 6


def test_an_empty_batch():
    for rounded in (False, True):
        _, _, dclip, dbias = compare_gradients(torch.float32, 0, 48, rounded, True, False)
        assert not dclip.any() and not dbias.any()
    compare_cuda("read_product", torch.empty(0, 48), None, None, bits=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, past, width", [(3, 0, 16), (3, 6, 16), (41, 1, 16), (3, 6, 10)])
def test_append_time(dtype, batch, past, width):
    before, now = torch.randn(batch, 3, past, width).to(dtype), torch.randn(batch, 3, 1, width).to(dtype)
    (found,) = compare_cuda("append_time", before, now, dtype=dtype, floats=(0,))
    assert torch.equal(found, torch.cat([before, now], dim=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (7,), (41, 48), (341, 9)])
def test_add(dtype, shape):
    a, b = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    (found,) = compare_cuda("add", a, b, dtype=dtype, floats=(0,))
    assert torch.equal(found, a + b)
