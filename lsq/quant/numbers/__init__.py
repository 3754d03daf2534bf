"""Number formats as plain data, to compare and to choose from: what a code is worth, which values
share a scale, how scales are stored and clips are measured.

What products read today is described in lsq/quant/formats.py.
"""

from lsq.quant.numbers.codebooks import SOURCES, fit_codebook, lloyd_max, lloyd_max_distortion, nf4
from lsq.quant.numbers.grains import Grain, as_matrix, grain
from lsq.quant.numbers.names import NUMBERS, PRESETS, SCALES, number_format, scaled_format
from lsq.quant.numbers.number import NumberFormat, signal_to_noise
from lsq.quant.numbers.scaled import METHODS, Encoded, FloatScales, PowerScales, ScaledFormat
from lsq.quant.numbers.tables import (
    fp4_e2m1,
    fp8_e4m3,
    fp8_e5m2,
    integer,
    logarithmic,
    multiplier,
    ternary,
)

__all__ = [
    "METHODS",
    "NUMBERS",
    "PRESETS",
    "SCALES",
    "SOURCES",
    "Encoded",
    "FloatScales",
    "Grain",
    "NumberFormat",
    "PowerScales",
    "ScaledFormat",
    "as_matrix",
    "fit_codebook",
    "fp4_e2m1",
    "fp8_e4m3",
    "fp8_e5m2",
    "grain",
    "integer",
    "lloyd_max",
    "lloyd_max_distortion",
    "logarithmic",
    "multiplier",
    "nf4",
    "number_format",
    "scaled_format",
    "signal_to_noise",
    "ternary",
]
