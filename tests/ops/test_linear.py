"""linear, linear_int8 and linear_int32: exact integers, blocks of rows, NaN."""

import math

import pytest
import torch

from lsq import quant
from lsq.config import QuantConfig
from lsq.gemm.product_key import OPERATIONS
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.ops.compare import compare, compare_program
from tests.ops.operands import ROWS

BLOCK_ROWS = OPERATIONS["linear_int8"].rows
CLIP = torch.tensor([0.7])


def operands(rows, inner=48, outputs=32):
    """Codes and scale of an input and a weight."""
    x, weight = (torch.randint(-127, 128, (n, inner), dtype=torch.int8) for n in (rows, outputs))
    return x, torch.tensor([0.01]), weight, 1e-3 * (1 + torch.rand(outputs))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
def test_in_programs(rows, clip_gradient):
    quantization = {"clip_gradient": clip_gradient}
    seen = compare_program(layers.feed_forward(config_of(**quantization), rows, True, True))
    assert {"linear_int8", "linear_int32"} <= seen
    assert "linear" in compare_program(layers.linear(QuantConfig(mode="float"), rows, 17, 9, True, True, True))


@pytest.mark.parametrize("rows", [*ROWS, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 6])
@pytest.mark.parametrize("bits", [8, 3])
def test_int8_results_are_exact(rows, bits):
    x, x_scale, weight, weight_scale = operands(rows)
    codes, scale, clipped, error = compare(
        "linear_int8", x, x_scale, weight, weight_scale, CLIP, bits=bits, error=True
    )
    sums = (x.long() @ weight.long().t()).float()
    scaled = sums * (x_scale * weight_scale / quant.scale_of(CLIP, bits))
    largest = quant.maximum_code(bits)
    assert torch.equal(codes, scaled.clamp(-largest, largest).round().to(torch.int8))
    assert torch.equal(clipped, quant.pack_bits(scaled.abs() > largest)) and clipped.any()
    assert torch.equal(scale, quant.scale_of(CLIP, bits))
    assert torch.equal(error, torch.where(scaled.abs() > largest, 0.0, (codes - scaled) / largest))


def test_int8_results_without_an_error():
    x, x_scale, weight, weight_scale = operands(7)
    *_, error = compare("linear_int8", x, x_scale, weight, weight_scale, CLIP, bits=8)
    assert error is None


@pytest.mark.parametrize("poisoned", ["input", "weight"])
def test_nan_scales_poison_the_result(poisoned):
    x, x_scale, weight, weight_scale = operands(BLOCK_ROWS + 9)
    (x_scale if poisoned == "input" else weight_scale)[0] = math.nan
    codes, scale, _, _ = compare("linear_int8", x, x_scale, weight, weight_scale, CLIP, bits=8)
    assert scale.isnan()
    assert not codes[:, 0].any()
    sums, sum_scale = compare("linear_int32", x, x_scale, weight, weight_scale)
    assert sum_scale.isnan().sum() == (32 if poisoned == "input" else 1)


def test_int32_sums_are_exact():
    x, x_scale, weight, weight_scale = operands(41, inner=2048)
    x.fill_(127)
    weight.fill_(-127)
    sums, scale = compare("linear_int32", x, x_scale, weight, weight_scale)
    assert (sums == -2048 * 127**2).all()
    assert torch.equal(scale, x_scale * weight_scale)
