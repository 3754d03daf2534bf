"""Small floats; codes are their bit patterns: sign, exponent, mantissa."""

import math

from lsq.quant.numbers.number import NumberFormat


def _values(exponent: int, mantissa: int) -> list[float]:
    """Values of all bit patterns of 1 + exponent + mantissa bits, without infinities and NaN."""
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
