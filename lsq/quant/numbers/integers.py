"""Integers: signed ones for values, whole multipliers for scales."""

import math

from lsq.quant.numbers.number import NumberFormat
from lsq.quant.rounding import maximum_code


def integer(bits: int) -> NumberFormat:
    """int<bits>, 2 to 8: from -Q to Q with Q = 2^(bits-1) - 1; codes are two's complement.

    Error: at most 1/2 of the scale for what is not clipped. The code of -2^(bits-1) is never given,
    as in rounding.quantize, so that negating is safe and nothing is biased; Chen et al. 2025
    (arXiv:2510.25602) show what that is worth in training.

    Raises:
        ValueError: `bits` is not a whole number from 2 to 8.
    """
    largest = maximum_code(bits)
    values = [*range(largest + 1), *range(-largest - 1, 0)]
    values[largest + 1] = -math.inf  # a code, but nothing is rounded to it
    return NumberFormat(name=f"int{bits}", values=tuple(map(float, values)))


def multiplier(bits: int) -> NumberFormat:
    """uint<bits>, 2 to 8: scales of 1 to 2^bits - 1 times another; code 0 is NaN.

    Error: at most 1/2 above 1. As VS-Quant's integer scales (Dai et al. 2021, arXiv:2102.04503),
    but never 0: a vector far below the largest of its channel is then rounded coarsely instead of
        to nothing.

    Raises:
        ValueError: `bits` is not a whole number from 2 to 8.
    """
    maximum_code(bits)
    return NumberFormat(name=f"uint{bits}", values=(math.nan, *map(float, range(1, 2**bits))))
