"""linear, linear_int8 and linear_int32 on CUDA: kernels and products in the emulator, or on a GPU."""

import math

import pytest
import torch

from tests.ops.cuda import compare_cuda
from tests.ops.operands import ROWS

CLIP = torch.tensor([0.7])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(rows, inner=48, outputs=32):
    """Codes and scale of an input and a weight."""
    x, weight = (torch.randint(-127, 128, (n, inner), dtype=torch.int8) for n in (rows, outputs))
    return x, torch.tensor([0.01]), weight, 1e-3 * (1 + torch.rand(outputs))


@pytest.mark.parametrize("rows, outputs, bits", [*((rows, 32, 8) for rows in (0, *ROWS)), (41, 272, 3)])
def test_int8_results_are_exact(rows, outputs, bits):
    codes, scale, clipped, error = compare_cuda(
        "linear_int8", *operands(rows, outputs=outputs), CLIP, exact=rows > 0, bits=bits, error=True
    )
    assert torch.equal(scale, CLIP / (2 ** (bits - 1) - 1))
    assert error is not None and (rows < 7 or clipped.any())


@pytest.mark.parametrize("unwanted", [(), (2,)])
def test_int8_results_without_an_error(unwanted):
    compare_cuda("linear_int8", *operands(7), CLIP, exact=True, unwanted=unwanted, bits=8)


@pytest.mark.parametrize("poisoned", ["input", "weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_scales_poison_the_result(poisoned, value):
    x, x_scale, weight, weight_scale = operands(41)
    x[3] = 0
    (x_scale if poisoned == "input" else weight_scale)[0] = value
    _, scale, _, _ = compare_cuda("linear_int8", x, x_scale, weight, weight_scale, CLIP, exact=True, bits=8)
    assert scale.isnan()
    compare_cuda("linear_int32", x, x_scale, weight, weight_scale, exact=True)


@pytest.mark.parametrize("rows", [0, 1, 41])
def test_int32_sums_and_scale(rows):
    compare_cuda("linear_int32", *operands(rows, outputs=272), exact=rows > 0)


def test_widths_that_no_product_takes_are_refused():
    with pytest.raises(ValueError, match="width of an int8 product is 40.*multiple of 16"):
        compare_cuda("linear_int32", *operands(7, inner=40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", ["same", "float32"])
@pytest.mark.parametrize("rows", [0, 7, 41])
def test_float_products(dtype, weight_dtype, rows):
    x, gradient = torch.randn(rows, 48).to(dtype), torch.randn(rows, 33).to(dtype)
    weight = torch.randn(33, 48)
    if weight_dtype == "same" or dtype != torch.float32:
        # A weight in float32 is rounded to the activations' dtype first.
        weight = weight.to(dtype).to(dtype if weight_dtype == "same" else torch.float32)
    compare_cuda("linear", x, weight, dtype=dtype, floats=(0,))
    compare_cuda("linear_input_gradient_float", gradient, weight, dtype=dtype, floats=(0,))
    compare_cuda("linear_weight_gradient_float", gradient, x, dtype=dtype)
