"""Weights and moments of 8 bits: bounds of their errors, and rounding without bias."""

import pytest
import torch

from lsq.quant import compact
from tests.sampling import first

SHAPES = [(1, 1), (3, 16), (5, 256), (4, 700)]


def rows(*shape: int) -> torch.Tensor:
    """Rows whose magnitudes differ by orders."""
    return torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]


@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_near_and_scales_are_exact(shape, remainder):
    values = rows(*shape)
    codes, parts, scale = compact.split_weight(values, torch.ones(shape[0]), remainder=remainder)
    found = compact.join_weight(codes, parts, scale).double()
    step = scale.double() / (compact.PARTS if remainder else 1)
    largest = values.double().abs().amax(1) / 127
    assert ((scale - largest).abs() <= largest * 2**-17).all()
    allowed = 0.502 * step + 127 * (scale - largest).abs()
    assert ((found - values.double()).abs() <= allowed[:, None]).all()
    assert torch.equal((scale * 127).double(), scale.double() * 127)


@pytest.mark.parametrize("remainder", [False, True])
def test_joined_values_are_split_into_the_same_codes(remainder):
    uniform = torch.rand(400, 33)
    given = compact.split_weight(
        rows(400, 33), torch.ones(400), remainder=remainder, uniform=uniform
    )
    again = compact.split_weight(
        compact.join_weight(*given), torch.full((400,), 7.0), remainder=remainder
    )
    for one, other in zip(given, again, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("remainder", [False, True])
def test_weights_are_rounded_without_bias(remainder):
    values, scale = torch.randn(6, 64), torch.ones(6)
    step = values.abs().amax(1) / 127 / (compact.PARTS if remainder else 1)
    total, count = torch.zeros(6, 64, dtype=torch.float64), 4000
    for _ in range(count):
        drawn = compact.split_weight(
            values,
            scale,
            remainder=remainder,
            uniform=torch.rand(6, 64),
            dither=torch.randint(128, (6,), dtype=torch.int32),
        )
        total += compact.join_weight(*drawn)
    # each rounding, of a code and of its scale, has a deviation of at most half a step
    limit = 6 * (step / 2 + values.abs().amax(1) * 2**-17).double() / count**0.5
    assert ((total / count - values).abs() <= limit[:, None] + 1e-6 * values.abs()).all()


def test_rows_of_zeros_keep_their_scale_and_others_without_numbers_lose_it():
    values = torch.randn(4, 32)
    values[0], values[1, 3], values[2, 5] = 0.0, torch.nan, torch.inf
    codes, parts, scale = compact.split_weight(values, torch.full((4,), 0.5), remainder=True)
    assert scale[0] == 0.5 and scale[1:3].isnan().all() and scale[3].isfinite()
    assert not codes[:3].any() and not parts[:3].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_are_near(shape):
    first, roots = rows(*shape), rows(*shape).abs()
    largest = compact._spread(compact._largest(first), shape[1])
    found = compact.decode_first(*compact.encode_first(first))
    share = (first.abs() / largest).sqrt()
    # a code moves the root of a value by half of 1/127
    assert ((found - first).abs() <= largest * (share + 0.01) * 1.01 / 127).all()
    largest = compact._spread(compact._largest(roots), shape[1])
    found = compact.decode_second(*compact.encode_second(roots))
    share = (roots / largest).sqrt()
    assert ((found - roots).abs() <= largest * (share + 0.01) * 1.01 / 255).all()
    assert (found[roots > 0] > 0).all()


def test_signs_and_zeros_of_moments_stay():
    values = torch.randn(3, 300)
    values[1, 7] = values[2] = 0.0
    codes, scale = compact.encode_first(values)
    found = compact.decode_first(codes, scale)
    assert not found[2].any() and found[1, 7] == 0 and not scale[2].any()
    assert (found[0] * values[0] >= 0).all()


def test_random_numbers_differ_by_key_row_and_use():
    like, key = torch.zeros(3, 16), torch.tensor([5])
    first = compact.uniform_numbers(key, compact.FIRST, like)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, compact.uniform_numbers(key, compact.SECOND, like))
    assert not torch.equal(first, compact.uniform_numbers(key + 1, compact.FIRST, like))


@pytest.mark.thorough
@pytest.mark.parametrize("second", first([True, False], 1))
def test_moments_are_rounded_without_bias(second):
    """Also small ones, whose neighbouring codes differ by several times their value."""
    values = torch.logspace(-5, 0, 64).repeat(2, 1)
    encode, decode = compact.encode_first, compact.decode_first
    if second:
        encode, decode = compact.encode_second, compact.decode_second
        values = values.sqrt()
    total, count = torch.zeros(2, 64, dtype=torch.float64), 20_000
    for _ in range(count):
        found = decode(*encode(values, torch.rand(2, 64))).double()
        total += found.square() if second else found
    wanted = values.double().square() if second else values.double()
    # codes are at most 2 / 127 of a root apart; of a fourth root 4 / 255
    spread = (wanted.sqrt() * 2 / 127 + 1 / 127**2) if not second else wanted**0.75 * 4 / 255
    assert ((total / count - wanted).abs() <= 6 * spread / count**0.5 + 1e-6 * wanted).all()
