"""What no format can beat: signal-to-noise over bits, of sources whose values do not depend on each
other.

A source has variance 1; R is bits per value. Scales in short groups know more of a tensor than that
it is Gaussian, so that a format may lie above the line of a source that the tensor is not.
"""

import math
from collections.abc import Callable

from lsq.quant.numbers import SOURCES, lloyd_max_distortion

DECIBELS_PER_BIT = 20 * math.log10(2)
"""6.02."""


def gaussian(bits: float) -> float:
    """The most signal-to-noise, in dB, of R bits a value of a Gaussian: D = 2^(-2R) (Shannon 1959).
    6.02 R."""
    return DECIBELS_PER_BIT * bits


def laplacian(bits: float) -> float:
    """The same of a Laplacian, by Shannon's lower bound D >= 2^(2h) 2^(-2R) / (2 pi e); h = log2(e
    sqrt(2)) bits.

    That is e / pi 2^(-2R), 0.63 dB above the Gaussian, whose values are the hardest to code. Nearly
    reached with many bits; unreachable, and above the truth, below one or two.
    """
    return DECIBELS_PER_BIT * bits + 10 * math.log10(math.pi / math.e)


BOUNDS: dict[str, Callable[[float], float]] = {"gaussian": gaussian, "laplacian": laplacian}
"""By the names of SOURCES."""


def lloyd_max(source: str, bits: int) -> float:
    """What the best 2^bits values reach where each value is coded by itself under one scale, in dB
    (Max 1960).

    Raises:
        ValueError: there is no such source, or `bits` is not from 1 to 6.
    """
    if source not in SOURCES or bits not in range(1, 7):
        raise ValueError(
            f"source {source!r}, {bits} bits; allowed: {', '.join(map(repr, SOURCES))}, and 1 to 6"
            " bits"
        )
    return -10 * math.log10(lloyd_max_distortion(source, bits))
