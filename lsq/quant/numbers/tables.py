"""Number formats of the field as tables: integers, small floats, logarithms and three values."""

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


def _values(exponent: int, mantissa: int) -> list[float]:
    """Values of all bit patterns (sign, exponent, mantissa) of a small float, before some of them
    become infinities and NaN."""
    bias = 2 ** (exponent - 1) - 1
    magnitudes = []
    for code in range(2 ** (exponent + mantissa)):
        power, fraction = divmod(code, 2**mantissa)
        whole = 1 if power else 0
        magnitudes.append(
            math.ldexp(whole * 2**mantissa + fraction, max(power, 1) - bias - mantissa)
        )
    return magnitudes + [-magnitude for magnitude in magnitudes]


def fp8_e4m3() -> NumberFormat:
    """E4M3: largest 448, smallest 2^-9, no infinities, NaN 0x7f (Micikevicius et al. 2022,
    arXiv:2209.05433).

    Error: at most 1/17 of the value from 2^-6 on, at most 2^-10 below. Infinities are clipped to
        448.
    """
    values = _values(4, 3)
    values[0x7F] = values[0xFF] = math.nan
    return NumberFormat(name="fp8-e4m3", values=tuple(values))


def fp8_e5m2() -> NumberFormat:
    """E5M2: largest 57344, smallest 2^-16, infinities 0x7c and NaN 0x7d (the same paper).

    Error: at most 1/9 of the value from 2^-14 on, at most 2^-17 below. Infinities are clipped to
    57344: no float becomes one of the codes of infinities.
    """
    values = _values(5, 2)
    for sign, start in ((1, 0x7C), (-1, 0xFC)):
        values[start : start + 4] = [sign * math.inf, math.nan, math.nan, math.nan]
    return NumberFormat(name="fp8-e5m2", values=tuple(values))


def fp4_e2m1() -> NumberFormat:
    """E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (OCP Microscaling Formats 1.0, 2023).

    Error: at most 1/5 of the value from 1 on, at most 1/4 below. No infinities, no NaN.
    """
    return NumberFormat(name="fp4-e2m1", values=tuple(_values(2, 1)))


def logarithmic(whole: int, fraction: int) -> NumberFormat:
    """log<n>.<m>: sign, n whole and m fraction bits of the logarithm; magnitudes r^-k up to 1, with
    r = 2^(1 / 2^m).

    The code is the sign, then 2^(n + m) - 1 - k; magnitude code 0 is zero, and NaN with the sign.
    Dally 2023 ("Hardware for deep learning", Hot Chips) puts 4.3 and 5.2 beside integers and floats
    of the same 8 bits.

    Error: at most (r - 1) / (r + 1) of the value: 4.3 % for m = 3, 8.6 % for m = 2; at most half of
    the smallest magnitude, r^-(2^(n + m) - 2), below that. The nearest value, not the nearest
    logarithm, is taken: both its squared and its largest relative error are smaller. Infinities are
        clipped to 1.

    Raises:
        ValueError: n is below 1, m below 0, or n + m is not from 2 to 7.
    """
    if whole < 1 or fraction < 0 or not 2 <= whole + fraction <= 7:
        raise ValueError(
            f"log{whole}.{fraction} has {whole} whole and {fraction} fraction bits; give at least 1"
            " and at least 0, "
            "together 2 to 7 (a sign comes on top)"
        )
    largest = 2 ** (whole + fraction) - 1
    magnitudes = [2.0 ** ((code - largest) / 2**fraction) for code in range(1, largest + 1)]
    values = (0.0, *magnitudes, math.nan, *(-magnitude for magnitude in magnitudes))
    return NumberFormat(name=f"log{whole}.{fraction}", values=values)


def ternary() -> NumberFormat:
    """-1, 0 and 1 as codes 0, 1 and 2, five of them to a byte: 1.6 bits each.

    Error: at most 1/2 of the scale for what is not clipped. Under the clip of least squared error
    these are the ternary weights of Li et al. 2016 (arXiv:1605.04711), whose rule for threshold and
    scale approximates that. No NaN.
    """
    return NumberFormat(name="ternary", values=(-1.0, 0.0, 1.0))
