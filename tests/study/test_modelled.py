"""Modelled resources, beside sums that are written out."""

import pytest

from lsq.study.modelled import bit_operations, joules


def test_bit_operations():
    assert bit_operations(3, 5, 7, 4, 8) == 3 * 5 * 7 * 32
    assert bit_operations(1, 1, 1, 2.5) == 20


def test_energy_of_one_multiplication_by_hand():
    """A weight, an input and a result of 8 bits, a quarter of a word each."""
    assert joules(1, 1, 1, 8) == pytest.approx(1e-12 * (0.2 + 0.064 + 160 + 2.5), rel=1e-12)


def test_energy_of_a_product_by_hand():
    multiplications, words = 4 * 32 * 64, 32 * 64 * 4 / 32
    expected = multiplications * (0.2 * 16 / 64 + 0.064) + words * 640 + 4 * 96 * 4 / 32 * 5
    assert joules(4, 32, 64, 4, 4) == pytest.approx(1e-12 * expected, rel=1e-12)


def test_a_multiplication_of_32_bits_is_16_of_8_bits():
    """Without additions and memory, which are linear in bits."""

    def quadratic(bits: int) -> float:
        return joules(1, 1, 1, 2 * bits, 2 * bits) - 2 * joules(1, 1, 1, bits, bits)

    # f(b) = c b^2 + d b + e: f(2 b) - 2 f(b) = 2 c b^2 - e
    assert quadratic(16) - quadratic(4) == pytest.approx(2 * 0.2e-12 * (4 - 1 / 4), rel=1e-6)


def test_few_rows_cost_the_reading_of_weights():
    """In decoding half the bits are nearly half the energy."""
    whole, half = joules(1, 768, 768, 8), joules(1, 768, 768, 4)
    assert 0.5 < half / whole < 0.505
