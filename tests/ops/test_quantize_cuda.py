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
