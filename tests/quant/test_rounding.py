"""The quantiser against arithmetic done by hand."""

import math

import numpy as np
import pytest
import torch

from lsq.quant import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    check_clip,
    maximum_code,
    pack_bits,
    quantize,
    scale_of,
    unpack_bits,
)
from tests.quant.fake import dequantize, fake_quantize

ALL_BITS = range(2, 9)
INFINITY = math.inf
NAN = math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_of(values, clip: float, bits: int = 8) -> list[int]:
    return quantize(torch.tensor(values), torch.tensor([clip]), bits).codes.tolist()


# codes


@pytest.mark.parametrize(
    "bits, maximum", list(zip(ALL_BITS, (1, 3, 7, 15, 31, 63, 127), strict=True))
)
def test_maximum_code(bits, maximum):
    assert maximum_code(bits) == maximum


@pytest.mark.parametrize("bits", (1, 9, 0, -8, 8.0, "8", None))
def test_maximum_code_refuses_other_widths(bits):
    with pytest.raises(ValueError, match="from 2 to 8"):
        maximum_code(bits)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("scale", (2.0**-3, 1.0, 2.0**20))
def test_codes_are_exact_at_every_rounding_boundary(bits, scale):
    """With a power of two as scale, k + 1/2 is exact and goes to the even side; the next floats do
    not."""
    maximum = maximum_code(bits)
    clip = torch.tensor([maximum * scale])
    lower = torch.arange(-maximum, maximum)
    middle = (lower + 0.5) * scale
    below = torch.nextafter(middle, torch.tensor(-INFINITY))
    above = torch.nextafter(middle, torch.tensor(INFINITY))
    assert torch.equal(quantize(below, clip, bits).codes.long(), lower)
    assert torch.equal(quantize(middle, clip, bits).codes.long(), lower + lower % 2)
    assert torch.equal(quantize(above, clip, bits).codes.long(), lower + 1)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("clip", (1.0, 16.0, 0.1, 1 / 3, 7e-9, 3e20))
def test_clip_is_the_last_value_inside(bits, clip):
    maximum = maximum_code(bits)
    clip = torch.tensor([clip])
    beyond = torch.nextafter(clip, torch.tensor(INFINITY))
    x = torch.cat([-clip, clip, -beyond, beyond, 2 * clip, -2 * clip])
    codes, scale, clipped = quantize(x, clip, bits)
    assert codes.tolist() == [-maximum, maximum, -maximum, maximum, maximum, -maximum]
    assert clipped.tolist() == [False, False, True, True, True, True]
    assert torch.equal(scale, clip / maximum)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_infinities_clip(bits):
    maximum = maximum_code(bits)
    codes, scale, clipped = quantize(torch.tensor([INFINITY, -INFINITY]), torch.tensor([2.5]), bits)
    assert codes.tolist() == [maximum, -maximum]
    assert clipped.all()
    assert torch.isfinite(scale).all()


def test_zeros_and_denormals():
    tiny = 2.0**-149
    assert codes_of([0.0, -0.0, tiny, -tiny, 2.0**-127], clip=1.0) == [0] * 5
    assert codes_of([0.0, tiny, -tiny], clip=SMALLEST_CLIP) == [0] * 3
    smallest = torch.tensor([SMALLEST_CLIP])
    assert quantize(-smallest, smallest).codes.tolist() == [-127]
    assert scale_of(smallest).item() > torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("bits", ALL_BITS)
def test_lowest_int8_code_never_appears(bits):
    x = torch.randn(341, 7, generator=generator()) * 10
    codes = quantize(x, torch.tensor([1.0]), bits).codes
    assert codes.dtype == torch.int8
    assert (int(codes.min()), int(codes.max())) == (-maximum_code(bits), maximum_code(bits))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("shape", ((1,), (7, 41), (3, 5, 9), (341, 1)))
def test_codes_agree_with_numpy(bits, shape):
    x = torch.randn(shape, generator=generator(1))
    clip = torch.rand(shape[0], generator=generator(2)) * 2 + 0.1
    scale = clip.numpy() / np.float32(maximum_code(bits))
    ratio = x.numpy() / scale.reshape(-1, *[1] * (len(shape) - 1))
    expected = np.rint(np.clip(ratio, -maximum_code(bits), maximum_code(bits)))
    result = quantize(x, clip, bits)
    assert np.array_equal(result.codes.numpy(), expected)
    assert np.array_equal(result.scale.numpy(), scale)


def test_row_clips_equal_one_clip_per_row():
    x = torch.randn(7, 41, generator=generator())
    clip = torch.linspace(0.5, 3, 7)
    together = quantize(x, clip)
    for row in range(7):
        alone = quantize(x[row], clip[row : row + 1])
        assert torch.equal(together.codes[row], alone.codes)
        assert torch.equal(together.clipped[row], alone.clipped)
        assert torch.equal(together.scale[row : row + 1], alone.scale)


def test_empty_tensor():
    codes, scale, clipped = quantize(torch.zeros(0, 16), torch.tensor([1.0]))
    assert codes.shape == clipped.shape == (0, 16)
    assert torch.isfinite(scale).all()


def test_scale_keeps_float64():
    assert scale_of(torch.tensor([1.0], dtype=torch.float64)).dtype == torch.float64
    assert scale_of(torch.tensor([1.0], dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("function", (quantize, fake_quantize))
def test_clip_of_wrong_shape_is_refused(function):
    with pytest.raises(ValueError, match=r"\[7\].*\[41, 7\].*\[1\] or \[41\]"):
        function(torch.zeros(41, 7), torch.ones(7))


# NaN


def test_nan_poisons_the_scale_of_its_tensor():
    codes, scale, clipped = quantize(torch.tensor([[1.0, NAN], [0.5, -9.0]]), torch.tensor([1.0]))
    assert codes.tolist() == [[127, 0], [64, -127]]
    assert clipped.tolist() == [[False, False], [False, True]]
    assert torch.isnan(scale).all()
    assert torch.isnan(dequantize(codes, scale)).all()


def test_nan_poisons_only_its_own_row():
    x = torch.ones(3, 7)
    x[1, 4] = NAN
    clip = torch.tensor([1.0, 2.0, 3.0])
    codes, scale, _ = quantize(x, clip)
    assert torch.isnan(scale).tolist() == [False, True, False]
    assert torch.isnan(dequantize(codes, scale)).any(1).tolist() == [False, True, False]
    assert torch.equal(clip, torch.tensor([1.0, 2.0, 3.0]))


# values


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("rows", (1, 41))
def test_fake_quantize_equals_quantize_then_dequantize(bits, rows):
    x = torch.randn(41, 7, generator=generator())
    clip = torch.linspace(0.3, 2, rows)
    codes, scale, _ = quantize(x, clip, bits)
    assert torch.equal(fake_quantize(x, clip, bits), dequantize(codes, scale))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_error_is_at_most_half_a_code_inside_the_clip(bits):
    x = torch.rand(341, dtype=torch.float64, generator=generator()) * 2 - 1
    clip = torch.ones(1, dtype=torch.float64)
    error = (fake_quantize(x, clip, bits) - x).abs().max()
    assert error <= 0.5 / maximum_code(bits) * (1 + 1e-12)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("clip_gradient", ("pact", "lsq"))
def test_dtypes_are_kept(dtype, clip_gradient):
    x = torch.randn(7, 9, generator=generator()).to(dtype).requires_grad_()
    clip = torch.ones(7, requires_grad=True)
    x_hat = fake_quantize(x, clip, 8, clip_gradient)
    x_hat.sum().backward()
    assert x_hat.dtype == x.grad.dtype == dtype
    assert clip.grad.dtype == torch.float32


def test_quantising_twice_changes_nothing():
    clip = torch.tensor([0.7])
    once = fake_quantize(torch.randn(341, generator=generator()), clip)
    assert torch.equal(fake_quantize(once, clip), once)


# usable clips


@pytest.mark.parametrize("value", (0.0, -1.0, NAN, INFINITY, SMALLEST_CLIP / 2, 3e38))
def test_check_clip_names_what_is_wrong(value):
    with pytest.raises(ValueError, match=r"encoder\.input_clip is .*1 of 3 values"):
        check_clip(torch.tensor([1.0, value, 1.0]), "encoder.input_clip")


def test_check_clip_accepts_usable_clips():
    check_clip(torch.tensor([SMALLEST_CLIP, 1.0, LARGEST_CLIP]), "clip")


# bit masks


@pytest.mark.parametrize("shape", ((0,), (1,), (7,), (8,), (9,), (3, 41), (341,), (2, 3, 4)))
def test_packed_bits(shape):
    mask = torch.rand(shape, generator=generator()) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), np.packbits(mask.numpy().flatten(), bitorder="little"))
    assert torch.equal(unpack_bits(packed, mask.numel()).view(shape), mask)


@pytest.mark.parametrize("numel", (8, 17))
def test_unpack_bits_refuses_another_count(numel):
    with pytest.raises(ValueError, match=f"{numel} bits"):
        unpack_bits(torch.zeros(2, dtype=torch.uint8), numel)
