"""What the gradients of products have in common."""

import pytest
import torch

from lsq.ops import product_gradient, rounding
from lsq.quant import pack_bits
from tests.ops.compare import KEY
from tests.ops.operands import product_of


def test_a_gradient_passes_where_nothing_was_rounded():
    gradient = torch.randn(5, 8)
    found, row_scale, dclip = product_gradient.finish(gradient, None, None, None, None, None, bits=8)
    assert found is gradient and row_scale is None and dclip is None


def test_a_gradient_is_masked_then_rounded():
    gradient, codes, outside = torch.randn(5, 8), torch.full((5, 8), -3, dtype=torch.int8), torch.rand(5, 8) < 0.3
    weight_scale = torch.rand(8)
    found, row_scale, dclip = product_gradient.finish(
        gradient, codes, pack_bits(outside), None, weight_scale, KEY, bits=8, stream=4
    )
    masked = torch.where(outside, 0.0, gradient)
    expected, scale = rounding.round_rows(masked, weight_scale, KEY, 4)
    assert torch.equal(found, expected) and torch.equal(row_scale, scale)
    torch.testing.assert_close(dclip, -gradient[outside].sum().reshape(1))


@pytest.mark.parametrize("kind, number", [("int8", 0), ("int32", 1), ("float32", 2)])
def test_kinds_have_the_numbers_of_rows_h(kind, number):
    y, scale = product_of(kind, 5, 8)
    assert product_gradient.arguments(y, scale, None, None, 8)[1] == number


def test_the_factor_of_lsq_goes_with_an_error():
    y, scale = product_of("int8", 5, 8)
    assert product_gradient.arguments(y, scale, None, None, 4)[-1] == 1.0
    assert product_gradient.arguments(y, scale, None, torch.zeros(5, 8), 4)[-1] == pytest.approx((40 * 7) ** -0.5)


def test_without_a_clip_values_stay():
    values = torch.randn(5, 8)
    assert product_gradient.round_or_keep(values, None, bits=8, error=True) == (values, None, None, None)
    codes, *_ = product_gradient.round_or_keep(values, torch.ones(1), bits=8, error=False)
    assert codes.dtype == torch.int8


def test_largest_code():
    assert product_gradient.largest_code(None, 8) == 0
    assert product_gradient.largest_code(torch.ones(1), 4) == 7
