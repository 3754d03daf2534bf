"""Backward products against autograd on the dequantised operands, and their int8 form against the float one."""

import math

import pytest
import torch

from lsq.config import QuantConfig
from lsq.gemm.product_key import OPERATIONS
from lsq.ops import rounding
from lsq.ops.linear_gradient import round_columns
from lsq.program import layers
from lsq.quant import fake_quantize, quantize
from tests.ops.compare import KEY, compare, compare_program, fused
from tests.ops.operands import ROWS

BLOCK_ROWS = OPERATIONS["linear_input_gradient"].rows
INNER, OUTPUTS = 48, 32


def case(rows, bits=8, granularity="channel"):
    """(x, its clip, weight, its clip, gradient) of a linear layer, with much of it clipped."""
    clips = OUTPUTS if granularity == "channel" else 1
    return (
        torch.randn(rows, INNER), torch.tensor([1.2]), torch.randn(OUTPUTS, INNER), 0.8 + torch.rand(clips),
        torch.randn(rows, OUTPUTS),
    )


def by_autograd(x, x_clip, weight, weight_clip, gradient, bits, clip_gradient):
    """Gradients of x, its clip, the weight and its clip, in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, x_clip, weight, weight_clip)]
    rounded = [fake_quantize(*leaves[i : i + 2], bits, clip_gradient) for i in (0, 2)]
    return torch.autograd.grad(rounded[0] @ rounded[1].t(), leaves, gradient.double())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
def test_in_a_program(rows, backward, granularity, clip_gradient):
    quantization = QuantConfig(backward=backward, weight_granularity=granularity, clip_gradient=clip_gradient)
    seen = compare_program(layers.linear(quantization, rows, INNER, OUTPUTS, True, True, True))
    assert {"linear_input_gradient", "linear_weight_gradient"} <= seen


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [7, 41])
def test_float_products_equal_autograd(clip_gradient, granularity, bits, rows):
    x, x_clip, weight, weight_clip, gradient = case(rows, bits, granularity)
    wanted = by_autograd(x, x_clip, weight, weight_clip, gradient, bits, clip_gradient)
    codes, scale, clipped, error = rounding.round_activation(x, x_clip, bits=bits, error=clip_gradient == "lsq")
    weight_codes, weight_scale, _ = quantize(weight, weight_clip, bits)
    weight_scale = weight_scale.expand(OUTPUTS).contiguous()
    dx, dclip = compare(
        "linear_input_gradient", gradient, None, weight_codes, weight_scale, codes, clipped, error, bits=bits
    )
    dweight, dweight_clip = compare(
        "linear_weight_gradient", gradient, None, codes, scale, weight_scale, weight, weight_clip, None, bits=bits,
        clip_gradient=clip_gradient,
    )
    for found, exact in zip((dx, dclip, dweight, dweight_clip), wanted, strict=True):
        assert found.shape == exact.shape
        assert (found - exact).abs().max() <= 2e-6 * exact.abs().max() + 1e-5


@pytest.mark.parametrize("rows", [41, BLOCK_ROWS + 3])
def test_int8_products_are_those_of_the_rounded_gradient(rows):
    """dx is exact in the codes; dweight rounds once more per column, by at most a code."""
    x, x_clip, weight, weight_clip, gradient = case(rows)
    x_codes, x_scale, clipped, _ = rounding.round_activation(x, x_clip, bits=8, error=False)
    weight_codes, weight_scale, _ = quantize(weight, weight_clip)
    codes, row_scale = rounding.round_rows(gradient, weight_scale, KEY, 1)
    dx, _ = compare(
        "linear_input_gradient", codes, row_scale, weight_codes, weight_scale, x_codes, clipped, None, bits=8
    )
    exact = (codes.double() @ weight_codes.double()) * row_scale.double()[:, None]
    exact = torch.where(x.abs() > x_clip, 0.0, exact)
    assert (dx - exact).abs().max() <= 1e-6 * exact.abs().max()
    dweight, _ = compare(
        "linear_weight_gradient", codes, row_scale, x_codes, x_scale, weight_scale, weight, weight_clip, KEY, bits=8,
        clip_gradient="pact", stream=5,
    )
    signal = (codes.double() * row_scale[:, None] / weight_scale).t() @ (x_codes.double() * x_scale)
    signal = torch.where(weight.abs() > weight_clip[:, None], 0.0, signal)
    assert (dweight - signal).norm() < 0.02 * signal.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_products(dtype):
    x, x_clip, weight, weight_clip, gradient = case(41)
    codes, scale, clipped, _ = rounding.round_activation(x, x_clip, bits=8, error=False)
    weight_codes, weight_scale, _ = quantize(weight, weight_clip)
    inputs = (gradient, None, weight_codes, weight_scale, codes, clipped, None)
    narrow, _ = compare("linear_input_gradient", *inputs, bits=8, dtype=dtype)
    exact, _ = fused("linear_input_gradient", *inputs, bits=8)
    assert narrow.dtype == torch.float32
    assert 0 < (narrow - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 16), (41, 48), (341, 17)])
def test_columns_are_rounded_like_the_reference(rows, columns):
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    codes[:, 0] = 0
    row_scale = torch.rand(rows)
    found, scale = torch.empty_like(codes), torch.empty(columns)
    round_columns(codes, row_scale, KEY, 3, found, scale)
    expected, expected_scale = rounding.round_columns(codes.float() * row_scale[:, None], KEY, 3)
    assert torch.equal(found, expected) and torch.equal(scale, expected_scale)
    assert scale[0] == 0


def test_a_poisoned_row_poisons_the_whole_weight_gradient():
    codes = torch.randint(-127, 128, (7, 16), dtype=torch.int8)
    row_scale = torch.rand(7)
    row_scale[3] = math.nan
    scale = torch.empty(16)
    round_columns(codes, row_scale, KEY, 3, torch.empty_like(codes), scale)
    assert scale.isnan().all()


def test_padded_rows_of_a_vocabulary_give_no_gradient():
    seen = compare_program(layers.vocabulary_loss(QuantConfig(), 21, INNER, 33, 48, 1, 0.1, True, True))
    assert "linear_weight_gradient" in seen
