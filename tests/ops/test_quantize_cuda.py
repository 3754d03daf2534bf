"""quantize on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from tests.ops.cuda import compare_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(1, 48), (7, 48), (41, 48), (341, 48), (7, 1040)])
def test_codes_scale_and_bits(rows, columns, dtype):
    x = torch.randn(rows, columns).to(dtype)
    compare_cuda("quantize", x, torch.tensor([1.5]), dtype=dtype, exact=True, bits=8, error=True)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ties_round_to_even_at_every_width(bits):
    largest = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * largest - 24, 2 * largest + 24) / 2
    x = steps[: steps.numel() // 8 * 8].reshape(1, -1).contiguous()
    compare_cuda("quantize", x, torch.tensor([float(largest)]), exact=True, bits=bits)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 400, 41 * 48 - 1])
def test_nan_poisons_the_scale(value, place):
    x = torch.randn(41, 48)
    x.view(-1)[place] = value
    _, scale, *_ = compare_cuda("quantize", x, torch.tensor([1.5]), exact=True, unwanted=(3,), bits=8)
    assert scale.isnan().item() == math.isnan(value)


def test_a_width_that_no_vector_fits_is_refused():
    with pytest.raises(ValueError, match="rows of 41 values.*multiple of 8"):
        compare_cuda("quantize", torch.randn(7, 41), torch.tensor([1.5]), bits=8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clips", [1, 33])
@pytest.mark.parametrize("rows", [None, 33, 48])
@pytest.mark.parametrize("columns", [48, 1040])
def test_weights(bits, clips, rows, columns):
    compare_cuda(
        "quantize_weight", torch.randn(33, columns), 0.5 + torch.rand(clips), exact=True, bits=bits, rows=rows
    )


@pytest.mark.parametrize("clips", [1, 41])
def test_nan_in_a_weight_poisons_what_shares_its_clip(clips):
    weight = torch.randn(41, 48)
    weight[3, 2], weight[29, 47], weight[30, 0] = math.nan, math.nan, math.inf
    _, scale = compare_cuda("quantize_weight", weight, torch.ones(clips), exact=True, bits=8, rows=48)
    assert scale.isnan().sum() == (2 if clips > 1 else 41)


def test_a_weight_whose_codes_no_product_takes_is_refused():
    with pytest.raises(ValueError, match="width of a weight is 40.*multiple of 16"):
        compare_cuda("quantize_weight", torch.randn(7, 40), torch.ones(1), bits=8)
