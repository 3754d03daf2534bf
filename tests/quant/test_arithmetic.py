"""The quantiser against arithmetic done by hand, its gradients against finite differences, and the
rounding of gradients at random."""

import math

import numpy as np
import pytest
import torch

from lsq import quant
from lsq.quant import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    arithmetic,
    check_clip,
    maximum_code,
    mean_clips,
    pack_bits,
    quantize,
    scale_of,
    unpack_bits,
)
from lsq.quant.random import uniform_rows
from tests.ops.compare import KEY, refused
from tests.quant.fake import dequantize, fake_quantize

ALL_BITS = range(2, 9)
INFINITY = math.inf
NAN = math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_of(values, clip: float, bits: int = 8) -> list[int]:
    return quantize(torch.tensor(values), torch.tensor([clip]), bits).codes.tolist()


def test_widths():
    assert [maximum_code(bits) for bits in ALL_BITS] == [1, 3, 7, 15, 31, 63, 127]
    for given, scale in ((torch.float64,) * 2, (torch.bfloat16, torch.float32)):
        assert scale_of(torch.ones(1, dtype=given)).dtype == scale


def test_mean_magnitudes():
    rows = torch.tensor([[1.0, -3.0], [0.0, 0.0], [NAN, 1.0], [1e-30, 0.0], [INFINITY, 1.0]])
    before = torch.tensor([9.0, 5.0, 6.0, 7.0, NAN])
    assert mean_clips(rows, before).tolist() == [2.0, 5.0, 6.0, SMALLEST_CLIP, 1.0]
    assert mean_clips(rows[:2], torch.ones(1)).tolist() == [1.0]
    assert mean_clips(rows, torch.full((1,), 3.0)).tolist() == [3.0]


@pytest.mark.parametrize("bits", (1, 9, 0, -8, 8.0, "8", None))
def test_maximum_code_refuses_other_widths(bits):
    with refused("from 2 to 8"):
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
    infinity = torch.tensor([INFINITY])
    x = torch.cat([-clip, clip, -beyond, beyond, -2 * clip, 2 * clip, -infinity, infinity])
    codes, scale, clipped = quantize(x, clip, bits)
    assert codes.tolist() == 4 * [-maximum, maximum]
    assert clipped.tolist() == 2 * [False] + 6 * [True]
    assert torch.equal(scale, clip / maximum)


def test_zeros_and_denormals():
    tiny = 2.0**-149
    assert codes_of([0.0, -0.0, tiny, -tiny, 2.0**-127], clip=1.0) == [0] * 5
    assert codes_of([0.0, tiny, -tiny], clip=SMALLEST_CLIP) == [0] * 3
    smallest = torch.tensor([SMALLEST_CLIP])
    assert quantize(-smallest, smallest).codes.tolist() == [-127]
    assert scale_of(smallest).item() > torch.finfo(torch.float32).tiny


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


def test_empty_tensor():
    codes, scale, clipped = quantize(torch.zeros(0, 16), torch.tensor([1.0]))
    assert codes.shape == clipped.shape == (0, 16)
    assert torch.isfinite(scale).all()


def test_clip_of_wrong_shape_is_refused():
    with refused(r"\[7\].*\[41, 7\].*\[1\] or \[41\]"):
        quantize(torch.zeros(41, 7), torch.ones(7))


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


@pytest.mark.parametrize("value", (0.0, -1.0, NAN, INFINITY, SMALLEST_CLIP / 2, 3e38))
def test_check_clip_names_what_is_wrong(value):
    with refused(r"encoder\.input_clip is .*1 of 3 values"):
        check_clip(torch.tensor([1.0, value, 1.0]), "encoder.input_clip")


def test_check_clip_accepts_usable_clips():
    check_clip(torch.tensor([SMALLEST_CLIP, 1.0, LARGEST_CLIP]), "clip")


@pytest.mark.parametrize("shape", ((0,), (1,), (7,), (8,), (9,), (3, 41), (341,), (2, 3, 4)))
def test_packed_bits(shape):
    mask = torch.rand(shape, generator=generator()) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), np.packbits(mask.numpy().flatten(), bitorder="little"))
    assert torch.equal(unpack_bits(packed, mask.numel()).view(shape), mask)


@pytest.mark.parametrize("numel", (8, 17))
def test_unpack_bits_refuses_another_count(numel):
    with refused(f"{numel} bits"):
        unpack_bits(torch.zeros(2, dtype=torch.uint8), numel)


INFINITIES = [math.nan, math.inf, -math.inf]


def mean_of_many(round_once, draws=400):
    """(mean, standard error) of the values after rounding with many keys."""
    drawn = torch.stack([round_once(torch.tensor([key])) for key in range(draws)]).double()
    return drawn.mean(0), drawn.std(0) / draws**0.5


def assert_unbiased(mean, error, expected):
    """The second term is for values so near to a code that few draws, or none, rounded them away
    from it."""
    assert ((mean - expected).abs() <= 5.5 * error + 1e-4 * expected.abs().max()).all()


def test_rows_are_rounded_without_bias():
    gradient, factor = torch.randn(7, 41), 0.5 + torch.rand(41)

    def once(key):
        codes, scale = arithmetic.round_rows(gradient, factor, key, 3)
        assert codes.dtype == torch.int8 and codes.abs().amax(1).eq(127).all()
        return codes * scale[:, None]

    assert_unbiased(*mean_of_many(once), gradient * factor)


def test_columns_are_rounded_without_bias():
    x = torch.randn(41, 7)

    def once(key):
        codes, scale = arithmetic.round_columns(x, key, 3)
        assert codes.abs().amax(0).eq(127).all()
        return codes * scale

    assert_unbiased(*mean_of_many(once), x)


def test_neighbours_that_go_up_together_add_no_noise_to_products():
    """Errors of a row have one word in common; a product with a matrix adds them up as if each had
    its own."""
    gradient, weight = torch.randn(400, 512), torch.randn(512, 64)
    codes, scale = arithmetic.round_rows(gradient, torch.ones(512), KEY, 3)
    error = codes.float() - gradient / scale[:, None]
    fraction = gradient / scale[:, None]
    fraction -= fraction.floor()
    independent = (fraction * (1 - fraction)) @ weight.square()
    assert 0.85 < ((error @ weight).square() / independent).mean() < 1.15
    assert (
        error.sum(1).square() / (fraction * (1 - fraction)).sum(1)
    ).mean() < 0.8  # they even out along a row


def test_the_product_of_two_rounded_matrices_has_no_bias():
    """As the gradient of a weight is made: errors of one and the same element of both must not go
    together."""
    gradient, x = torch.randn(16, 5), torch.randn(16, 5)
    largest = 1  # rounded as coarsely as can be

    def once(key):
        codes, scale = arithmetic.round_rows(gradient, torch.ones(5), key, 1, largest)
        others, steps = arithmetic.round_columns(x * scale[:, None], key, 2, largest)
        return codes.float().t() @ others.float() * steps

    assert_unbiased(*mean_of_many(once), gradient.t() @ x)


@pytest.mark.parametrize("value", INFINITIES)
def test_rows_that_are_not_finite_become_nan(value):
    gradient = torch.randn(5, 9)
    gradient[2, 4] = value
    codes, scale = arithmetic.round_rows(gradient, torch.ones(9), KEY, 1)
    assert scale.isnan().tolist() == [False, False, True, False, False]
    assert not codes[2].any()
    codes, scale = arithmetic.round_columns(gradient, KEY, 1)
    assert scale.isnan().nonzero().item() == 4 and not codes[:, 4].any()


@pytest.mark.parametrize("largest", [0.0, 1e-40, 9e-36])
def test_vanishing_rows_become_zero(largest):
    gradient = torch.randn(3, 9)
    gradient[1] = largest * torch.linspace(-1, 1, 9)
    codes, scale = arithmetic.round_rows(gradient, torch.ones(9), KEY, 1)
    assert not codes[1].any() and scale[1] == 0
    assert scale[[0, 2]].gt(0).all()


def test_the_smallest_gradient_that_counts():
    scale, reciprocal = arithmetic.gradient_scale(torch.tensor([1.1e-35, 3e38]))
    assert scale.isfinite().all() and reciprocal.isfinite().all()
    torch.testing.assert_close(scale * 127, torch.tensor([1.1e-35, 3e38]))


@pytest.mark.parametrize("bits", (2, 5, 8))
@pytest.mark.parametrize("rows", (1, 7))
@pytest.mark.parametrize("clip_gradient", ("pact", "lsq"))
def test_gradients_of_clips_are_finite_differences(bits, rows, clip_gradient):
    """Rounding counts as the identity under PACT, so that sum(g * clamp(x, -c, c)) is the loss to
    differentiate; under LSQ the rounding error of what lies inside stays as it is, in codes."""
    random, maximum = generator(bits), maximum_code(bits)
    x = torch.randn(7, 41, dtype=torch.float64, generator=random).requires_grad_()
    clip = (torch.rand(rows, dtype=torch.float64, generator=random) + 0.5).requires_grad_()
    g = torch.randn(7, 41, dtype=torch.float64, generator=random)
    (fake_quantize(x, clip, bits, clip_gradient) * g).sum().backward()
    ratio = (x / (clip.view(-1, 1) / maximum)).detach()
    offset = (ratio.round() - ratio) * (clip_gradient == "lsq")
    outside = ratio.abs() > maximum

    def loss(c):
        inside = c.view(-1, 1) / maximum * offset + x
        values = torch.where(outside, x.sign() * c.view(-1, 1), inside)
        return (g * values).detach().reshape(rows, -1).sum(1)

    slope = (loss(clip + 1e-6) - loss(clip - 1e-6)) / 2e-6
    if clip_gradient == "lsq":
        slope = slope / math.sqrt(7 * 41 / rows * maximum)
    torch.testing.assert_close(clip.grad, slope, rtol=1e-7, atol=1e-8)
    assert torch.equal(x.grad, g * ~outside)


def test_straight_through_follows_the_bits():
    gradient, x = torch.randn(7, 5), 2 * torch.randn(7, 5)
    for bits, with_error in ((8, False), (4, True)):
        codes, scale, clipped, error = arithmetic.round_activation(
            x, torch.tensor([1.5]), bits=bits, error=with_error
        )
        outside = x.abs() > 1.5
        dx, dclip = arithmetic.straight_through(gradient, codes, clipped, error, bits=bits)
        assert torch.equal(dx, torch.where(outside, 0.0, gradient))
        expected = (gradient * x.sign())[outside].sum()
        if with_error:
            expected += (gradient * (codes * scale - x) / 1.5)[~outside].sum()
            expected *= 1 / math.sqrt(35 * 7)
        torch.testing.assert_close(dclip, expected.reshape(1))


def test_activations_are_rounded_with_their_error():
    x, clip = torch.tensor([[1.0, math.nan, math.inf, 0.3]]), torch.tensor([1.0])
    codes, scale, clipped, error = arithmetic.round_activation(x, clip, bits=8, error=True)
    assert codes.tolist() == [[127, 0, 127, 38]] and scale.isnan()
    assert quant.unpack_bits(clipped, 4).tolist() == [False, False, True, False]
    torch.testing.assert_close(
        error[0, [0, 2, 3]], torch.tensor([0.0, 0.0, (38 - 0.3 * 127) / 127])
    )


def test_random_rounding_uses_its_subsequence():
    gradient = torch.randn(3, 8)
    codes, _ = arithmetic.round_rows(gradient, torch.ones(8), KEY, 7)
    expected = (
        gradient * (127 / gradient.abs().amax(1))[:, None] + uniform_rows(KEY, 7, 3, 8)
    ).floor()
    assert torch.equal(codes, expected.clamp(-127, 127).to(torch.int8))
    assert not torch.equal(codes, arithmetic.round_rows(gradient, torch.ones(8), KEY, 8)[0])
