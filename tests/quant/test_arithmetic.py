"""Rounding of gradients at random, and the straight-through gradients, against their
definitions."""

import math

import pytest
import torch

from lsq import quant
from lsq.quant import arithmetic
from lsq.quant.random import uniform_rows
from tests.ops.compare import KEY

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


def test_one_value_goes_up_as_often_as_its_fraction():
    gradient = torch.full((1, 100_001), 0.3)
    gradient[0, 0] = 127.0
    codes, scale = arithmetic.round_rows(gradient, torch.ones(100_001), KEY, 1)
    assert scale == 1.0
    up = codes[0, 1:].float()
    assert set(up.tolist()) == {0.0, 1.0}
    assert abs(up.mean() - 0.3) < 5 * (0.21 / 100_000) ** 0.5


def test_codes_of_many_rows_have_no_bias():
    """One row after another has the same values, whose mean is off by what rounding is off by, and
    no more."""
    row = torch.cat([torch.tensor([127.0]), 3 * torch.randn(40)])
    codes, _ = arithmetic.round_rows(row.expand(200_000, 41), torch.ones(41), KEY, 1)
    fraction = row - row.floor()
    error = (fraction * (1 - fraction) / len(codes)).sqrt()
    assert ((codes.double().mean(0) - row).abs() <= 4.5 * error).all()


def test_sums_of_rows_and_of_columns_have_no_bias():
    gradient = torch.randn(24, 55)

    def once(key):
        codes, scale = arithmetic.round_rows(gradient, torch.ones(55), key, 3)
        rounded = codes.double() * scale[:, None]
        return torch.cat([rounded.sum(1), rounded.sum(0)])

    assert_unbiased(
        *mean_of_many(once), torch.cat([gradient.double().sum(1), gradient.double().sum(0)])
    )


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


def test_whole_codes_stay():
    gradient = torch.cat([torch.arange(-127.0, 128.0), torch.tensor([-0.0])])[None]
    codes, scale = arithmetic.round_rows(gradient, torch.ones(256), KEY, 1)
    assert scale == 1.0 and torch.equal(codes[0], gradient[0].to(torch.int8))


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
