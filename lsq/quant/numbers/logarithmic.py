"""Logarithmic numbers: a sign and the binary logarithm of the magnitude, in fixed point."""

import math

from lsq.quant.numbers.number import NumberFormat


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
