"""Rounding of gradients at random, and the straight-through gradients, against their definitions."""

import math

import pytest
import torch

from lsq import quant
from lsq.ops import rounding
from lsq.ops.random import uniform
from tests.ops.compare import KEY, fused

INFINITIES = [math.nan, math.inf, -math.inf]


def mean_of_many(round_once, draws=400):
    """(mean, standard error) of the values after rounding with many keys."""
    drawn = torch.stack([round_once(torch.tensor([key])) for key in range(draws)]).double()
    return drawn.mean(0), drawn.std(0) / draws**0.5


def assert_unbiased(mean, error, expected):
    assert ((mean - expected).abs() <= 5.5 * error + 1e-5 * expected.abs().max()).all()


def test_rows_are_rounded_without_bias():
    gradient, factor = torch.randn(7, 41), 0.5 + torch.rand(41)

    def once(key):
        codes, scale = rounding.round_rows(gradient, factor, key, 3)
        assert codes.dtype == torch.int8 and codes.abs().amax(1).eq(127).all()
        return codes * scale[:, None]

    assert_unbiased(*mean_of_many(once), gradient * factor)


def test_columns_are_rounded_without_bias():
    x = torch.randn(41, 7)

    def once(key):
        codes, scale = rounding.round_columns(x, key, 3)
        assert codes.abs().amax(0).eq(127).all()
        return codes * scale

    assert_unbiased(*mean_of_many(once), x)


def test_one_value_goes_up_as_often_as_its_fraction():
    gradient = torch.full((1, 100_001), 0.3)
    gradient[0, 0] = 127.0
    codes, scale = rounding.round_rows(gradient, torch.ones(100_001), KEY, 1)
    assert scale == 1.0
    up = codes[0, 1:].float()
    assert set(up.tolist()) == {0.0, 1.0}
    assert abs(up.mean() - 0.3) < 5 * (0.21 / 100_000) ** 0.5


def test_whole_codes_stay():
    gradient = torch.cat([torch.arange(-127.0, 128.0), torch.tensor([-0.0])])[None]
    codes, scale = rounding.round_rows(gradient, torch.ones(256), KEY, 1)
    assert scale == 1.0 and torch.equal(codes[0], gradient[0].to(torch.int8))


@pytest.mark.parametrize("value", INFINITIES)
def test_rows_that_are_not_finite_become_nan(value):
    gradient = torch.randn(5, 9)
    gradient[2, 4] = value
    codes, scale = rounding.round_rows(gradient, torch.ones(9), KEY, 1)
    assert scale.isnan().tolist() == [False, False, True, False, False]
    assert not codes[2].any()
    codes, scale = rounding.round_columns(gradient, KEY, 1)
    assert scale.isnan().nonzero().item() == 4 and not codes[:, 4].any()


@pytest.mark.parametrize("largest", [0.0, 1e-40, 9e-36])
def test_vanishing_rows_become_zero(largest):
    gradient = torch.randn(3, 9)
    gradient[1] = largest * torch.linspace(-1, 1, 9)
    codes, scale = rounding.round_rows(gradient, torch.ones(9), KEY, 1)
    assert not codes[1].any() and scale[1] == 0
    assert scale[[0, 2]].gt(0).all()


def test_the_smallest_gradient_that_counts():
    scale, reciprocal = rounding.gradient_scale(torch.tensor([1.1e-35, 3e38]))
    assert scale.isfinite().all() and reciprocal.isfinite().all()
    torch.testing.assert_close(scale * 127, torch.tensor([1.1e-35, 3e38]))


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 3), (41, 17), (341, 48)])
def test_the_fused_loops_draw_the_same_codes(rows, columns):
    gradient, factor = torch.randn(rows, columns), 0.5 + torch.rand(columns)
    gradient[0, 0] = math.inf
    codes, scale, _, _ = fused(
        "read_product_backward", gradient, None, None, None, factor, KEY, bits=8, bias=False, gradient_stream=9
    )
    expected, expected_scale = rounding.round_rows(gradient, factor, KEY, 9)
    assert torch.equal(codes, expected)
    assert torch.equal(scale[1:], expected_scale[1:]) and scale[0].isnan()


def test_straight_through_follows_the_bits():
    gradient, x = torch.randn(7, 5), 2 * torch.randn(7, 5)
    for bits, with_error in ((8, False), (4, True)):
        codes, scale, clipped, error = rounding.round_activation(x, torch.tensor([1.5]), bits=bits, error=with_error)
        outside = x.abs() > 1.5
        dx, dclip = rounding.straight_through(gradient, codes, clipped, error, bits=bits)
        assert torch.equal(dx, torch.where(outside, 0.0, gradient))
        expected = (gradient * x.sign())[outside].sum()
        if with_error:
            expected += (gradient * (codes * scale - x) / 1.5)[~outside].sum()
            expected *= 1 / math.sqrt(35 * 7)
        torch.testing.assert_close(dclip, expected.reshape(1))


def test_products_round_like_values():
    """round_scaled(x / scale) is round_activation(x), with clipping decided on the scaled value."""
    x, clip = torch.randn(7, 5), torch.tensor([1.0])
    wanted = rounding.round_activation(x, clip, bits=8, error=True)
    found = rounding.round_scaled(x / quant.scale_of(clip), clip, bits=8, error=True)
    for output, expected in zip(found, wanted, strict=True):
        assert torch.equal(output, expected)


def test_nan_in_a_product_poisons_its_scale():
    scaled = torch.tensor([[1.0, math.nan, math.inf]])
    codes, scale, clipped, _ = rounding.round_scaled(scaled, torch.tensor([1.0]), bits=8, error=False)
    assert codes.tolist() == [[1, 0, 127]] and scale.isnan()
    assert quant.unpack_bits(clipped, 3).tolist() == [False, False, True]


def test_random_rounding_uses_its_stream():
    gradient = torch.randn(3, 8)
    codes, scale = rounding.round_rows(gradient, torch.ones(8), KEY, 7)
    expected = (gradient * (127 / gradient.abs().amax(1))[:, None] + uniform(KEY, 7, (3, 8))).floor()
    assert torch.equal(codes, expected.clamp(-127, 127).to(torch.int8))
    assert not torch.equal(codes, rounding.round_rows(gradient, torch.ones(8), KEY, 8)[0])
