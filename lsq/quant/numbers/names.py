"""Names of formats: <number>/<grain>/<scales>, as in "int4/group16/uint4", and shorter ones for
well-known ones."""

import difflib
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch

from lsq.quant.numbers.codebooks import SOURCES, lloyd_max, nf4
from lsq.quant.numbers.grains import Grain, grain, is_grain
from lsq.quant.numbers.number import NumberFormat
from lsq.quant.numbers.scaled import FloatScales, PowerScales, ScaledFormat
from lsq.quant.numbers.tables import (
    fp4_e2m1,
    fp8_e4m3,
    fp8_e5m2,
    integer,
    logarithmic,
    multiplier,
    ternary,
)

NUMBERS: dict[str, Callable[[], NumberFormat]] = {
    **{f"int{bits}": partial(integer, bits) for bits in range(2, 9)},
    "fp8-e4m3": fp8_e4m3,
    "fp8-e5m2": fp8_e5m2,
    "fp4-e2m1": fp4_e2m1,
    **{
        f"log{whole}.{fraction}": partial(logarithmic, whole, fraction)
        for whole, fraction in ((2, 1), (3, 0), (3, 2), (4, 1), (4, 3), (5, 2))
    },
    "nf4": nf4,
    **{
        f"lloyd{bits}-{source}": partial(lloyd_max, source, bits)
        for source in SOURCES
        for bits in range(1, 7)
    },
    "ternary": ternary,
}
"""Name -> what makes the number format."""
FLOAT32 = FloatScales(torch.float32)
SCALES: dict[str, FloatScales | PowerScales | ScaledFormat] = {
    "float32": FLOAT32,
    "bfloat16": FloatScales(torch.bfloat16),
    "e8m0": PowerScales(),
    "e4m3": ScaledFormat(name="e4m3", number=fp8_e4m3(), grain=Grain.TENSOR, scales=FLOAT32),
    "uint4": ScaledFormat(name="uint4", number=multiplier(4), grain=Grain.ROW, scales=FLOAT32),
    "uint6": ScaledFormat(name="uint6", number=multiplier(6), grain=Grain.ROW, scales=FLOAT32),
}
"""Name -> how scales are stored: e4m3 under one float32 of the tensor, uint4 and uint6 under one of
each row."""
PRESETS = {
    "int8-tensor": "int8/tensor/float32",
    "int8-row": "int8/row/float32",
    "mxint8": "int8/group32/e8m0",
    "mxfp8-e4m3": "fp8-e4m3/group32/e8m0",
    "mxfp8-e5m2": "fp8-e5m2/group32/e8m0",
    "mxfp4": "fp4-e2m1/group32/e8m0",
    "nvfp4": "fp4-e2m1/group16/e4m3",
    "vsquant4": "int4/group16/uint4",
    "vsquant4-6": "int4/group16/uint6",
    "vsquant6": "int6/group16/uint6",
    "nf4-64": "nf4/group64/float32",
}
"""Name -> what it stands for.

MX: OCP Microscaling Formats 1.0; vsquant4-6: 4 bits with scales of 6.
"""


@cache
def scaled_format(name: str) -> ScaledFormat:
    """The format called so: a preset, or <number>/<grain> with float32 scales, or
    <number>/<grain>/<scales>.

    Raises:
        ValueError: a part is unknown; the nearest names are offered.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"a number format is called {name!r}; its name is a string, as {next(iter(PRESETS))!r}"
        )
    if name in NUMBERS:
        raise ValueError(
            f"{name!r} does not say which values share a scale; give {name}/row, {name}/group32 or"
            " such"
        )
    preset, *more = name.split("/")
    if more and preset in PRESETS:
        raise ValueError(
            f"{name!r}: {preset} has its own grain and scales, it is {PRESETS[preset]}; leave"
            f" /{'/'.join(more)} out, "
            f"or give <number>/<grain>/<scales>, as {PRESETS[preset].partition('/')[0]}/row"
        )
    parts = all_parts(name).split("/")
    if len(parts) != 3:
        raise ValueError(
            f"no number format is called {name!r}{_meant(name)}; give one of {', '.join(PRESETS)},"
            " or "
            "<number>/<grain> or <number>/<grain>/<scales>, as int4/group16/uint4"
        )
    stored = parts[2]
    if stored not in SCALES:
        raise ValueError(
            f"{name!r}: no scales are called {stored!r}{_nearest(stored, SCALES)}; allowed:"
            f" {', '.join(SCALES)}"
        )
    return ScaledFormat(
        name=name, number=number_format(parts[0]), grain=grain(parts[1]), scales=SCALES[stored]
    )


def all_parts(name: str) -> str:
    """A format's name with its grain and scales: int8-row and int8/row are both int8/row/float32.

    Others stay.
    """
    written = PRESETS.get(name, name)
    return f"{written}/float32" if written.count("/") == 1 else written


@cache
def number_format(name: str) -> NumberFormat:
    """The number format called so in NUMBERS.

    Raises:
        ValueError: there is none; the nearest names are offered.
    """
    if name not in NUMBERS:
        raise ValueError(
            f"no number is called {name!r}{_nearest(name, NUMBERS)}; allowed: {', '.join(NUMBERS)}"
        )
    return NUMBERS[name]()


def _meant(name: str) -> str:
    """What a name may have meant that is no format's: few formats have a name with a dash, as
    int8-row has."""
    number, _, grained = name.rpartition("-")
    if number in NUMBERS and is_grain(grained):
        return f" (did you mean {number}/{grained}?)"
    return _nearest(name, (*PRESETS, *NUMBERS))


def _nearest(name: str, allowed: Iterable[str]) -> str:
    found = difflib.get_close_matches(name.lower(), allowed, n=2)
    return f" (did you mean {' or '.join(found)}?)" if found else ""
