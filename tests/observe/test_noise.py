"""Signal-to-noise of tensors, and bounds."""

import math

import pytest
import torch

from lsq.observe.noise import LEAST, MOST, Bounds, Reading, decibels


def test_decibels_of_even_noise():
    expected = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    noise = 0.01 * torch.randn(40, 300, generator=torch.Generator().manual_seed(2))
    for dim in (0, 1):
        assert decibels((expected, expected + noise, dim)) == pytest.approx(40, abs=0.6)


def test_a_large_row_hides_no_small_ones():
    expected = torch.ones(10, 8)
    expected[0] = 1e4
    found = expected.clone()
    found[1:] = 0
    assert decibels((expected, found, 1)) == pytest.approx(-10 * math.log10(0.9), abs=1e-3)
    assert decibels((expected.t(), found.t(), 0)) == decibels((expected, found, 1))


def test_many_small_rows_hide_no_large_one():
    expected = torch.ones(1000, 8)
    expected[0] = 1e4
    found = expected.clone()
    found[0] = 0
    assert decibels((expected, found, 1)) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("expected", "found", "answer"),
    [
        (torch.ones(3, 4), torch.ones(3, 4), MOST),
        (torch.ones(3, 4), torch.full((3, 4), math.nan), LEAST),
        (torch.ones(3, 4), torch.full((3, 4), math.inf), LEAST),
        (torch.ones(3, 4), torch.full((3, 4), 1e18), LEAST),
        (torch.zeros(3, 4), torch.ones(3, 4), None),
        (torch.full((3, 4), math.nan), torch.ones(3, 4), None),
        (torch.tensor([10.0]), torch.tensor([9.0]), 20.0),
        (torch.tensor(10.0), torch.tensor(9.0), 20.0),
        (
            torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
            torch.tensor([[1.0, 0.9], [5.0, 0.0]]),
            -10 * math.log10(0.005),
        ),
    ],
)
def test_decibels_at_the_edges(expected, found, answer):
    result = decibels((expected, found, 1))
    assert result is None if answer is None else result == pytest.approx(answer, abs=1e-4)


def test_tensors_together():
    """One with hardly any signal does not count in the sum, and as one slice among all in the
    mean."""
    large, small = torch.ones(9, 8), torch.full((1, 8), 1e-3)
    assert decibels((large, large, 1), (small, torch.zeros(1, 8), 1)) == pytest.approx(10, abs=1e-3)
    assert decibels((large.t(), 0.9 * large.t(), 0), (small, small, 1)) == pytest.approx(
        20, abs=1e-3
    )
    assert decibels() is None


def test_what_a_reading_has_and_what_is_below():
    reading = Reading(output=12.0, weight_gradient=7.5)
    assert reading.values() == {"output": 12.0, "weight_gradient": 7.5}
    bounds = Bounds(output=12.5, input_gradient=3, weight_gradient=7.5)
    assert bounds.broken(reading) == ["output 12.0 dB, below 12.5"]
    assert not bounds.broken(Reading())


@pytest.mark.parametrize("value", [math.nan, "12", None])
def test_bounds_are_numbers(value):
    with pytest.raises(ValueError, match=f"output is {value!r}; it must be a number of decibels"):
        Bounds(output=value)
