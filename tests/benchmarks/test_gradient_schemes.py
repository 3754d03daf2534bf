"""Schemes of rounding gradients, against what their names say."""

import pytest
import torch
from gradient_schemes import SCHEMES, Blocks, Delayed, Place, PredictedRows, Scheme, folded

FIRST, NEXT = Place(product=0), Place(product=1, follows=True)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(1)


@pytest.fixture
def gradient(generator):
    rows = torch.randn(70, 1, generator=generator).exp()
    return torch.randn(70, 45, generator=generator) * rows


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, None), (None, 1), (32, 32), (1, 32), (32, 1), (None, None)]
)
def test_blocks_have_their_largest_values(gradient, rows, columns):
    found = Blocks(rows=rows, columns=columns).magnitudes(gradient, FIRST).expand_as(gradient)
    for first in range(0, 70, rows or 70):
        for left in range(0, 45, columns or 45):
            block = slice(first, first + (rows or 70)), slice(left, left + (columns or 45))
            assert (found[block] == gradient[block].abs().max()).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_is_off_by_less_than_a_step_and_right_on_average(gradient, generator, name):
    scheme = SCHEMES[name]()
    total, times = torch.zeros_like(gradient), 200
    for _ in range(times):
        for codes in scheme.round(gradient, FIRST, generator):
            assert codes.codes.abs().max() <= 127
            assert ((codes.values - gradient).abs() <= codes.scale * 1.0001).all()
        total += codes.values
    if scheme.stochastic:
        assert ((total / times - gradient).abs() <= 6 * 0.5 * codes.scale / times**0.5).all()


def test_a_delayed_scale_is_that_of_passes_before():
    grain, ones = Delayed(history=2, margin=1.5), torch.ones(4, 4)
    found = [grain.magnitudes(size * ones, FIRST).item() for size in (1, 4, 2, 1, 1)]
    assert found == [1.5, 1.5, 6.0, 6.0, 3.0]
    assert grain.magnitudes(7 * ones, NEXT).item() == 10.5  # another product


def test_rows_are_predicted_from_those_of_the_product_before():
    grain, rows = PredictedRows(), torch.tensor([[1.0], [2.0], [4.0]])
    assert grain.magnitudes(rows, FIRST).tolist() == rows.tolist()
    # the first pass knows its own factor
    assert grain.magnitudes(3 * rows, NEXT).tolist() == (3 * rows).tolist()
    assert grain.magnitudes(10 * rows, FIRST).tolist() == (10 * rows).tolist()
    assert grain.magnitudes(rows, NEXT).tolist() == (30 * rows).tolist()


def test_powers_of_two(gradient, generator):
    codes, _ = SCHEMES["128x128, power of two"]().round(gradient, FIRST, generator)
    exact, _ = SCHEMES["128x128"]().round(gradient, FIRST, generator)
    assert (codes.scale.log2() % 1 == 0).all()
    assert ((codes.scale >= exact.scale) & (codes.scale < 2 * exact.scale)).all()


def test_vanishing_gradients_become_zero(generator):
    codes, _ = Scheme(grain=Blocks(rows=1, columns=None)).round(torch.zeros(3, 4), FIRST, generator)
    assert not codes.codes.any() and not codes.scale.any()


def test_x_times_scales_of_rows_is_rounded_in_columns(gradient, generator):
    scale = torch.rand(70, 1, generator=generator)
    steps = (gradient * scale).abs().amax(dim=0) / 127
    assert ((folded(gradient, scale, generator) - gradient * scale).abs() <= steps * 1.0001).all()
