"""Number formats that users declare: a table of values under a name, without a compiler."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch

from lsq.quant.formats import format_choice
from lsq.quant.numbers import BUILT_IN, NUMBER_FORMATS, PRESETS, SCALES
from lsq.quant.tables import NumberFormat, lookup

NAME = re.compile(r"\w[\w.-]*")
"""Names that `scaled_format` and patterns of formats can read."""
LARGEST = 2.0**64
"""Bound of values; the largest one is at least 1 / LARGEST, so that scales stay normal floats."""


def number_format(rule: Callable[..., Any] | None = None, /, *, bits: int | None = None) -> Any:
    """Declare a number format. It has the name of the function, as written.

        @lsq.number_format
        def seven():
            return -4, -2, -1, 0, 1, 2, 4

        @lsq.number_format(bits=3)
        def squares(code):
            return (code - 3) * abs(code - 3)

    From then on "seven/group64/bfloat16" is a format as "nf4/group64/bfloat16" is. Without `bits`
    the function returns all values in the order of their codes, or a NumberFormat. With `bits` it
    returns the value of one code, 0 to 2^bits - 1.

    Returns:
        The NumberFormat, in place of the function.

    Raises:
        ValueError: `bits` is no whole number from 1 to 8; there are not 2 to 256 values, two of
            them different; a value is not finite, or too close to another; or the name is taken.
    """
    if bits is not None and (type(bits) is not int or not 1 <= bits <= 8):
        raise ValueError(f"bits is {bits!r}; it must be a whole number from 1 to 8")
    if rule is None:
        return partial(number_format, bits=bits)
    if not callable(rule) or not hasattr(rule, "__name__"):
        raise TypeError(f"@lsq.number_format stands above a function, not {rule!r}")
    try:
        inspect.signature(rule).bind(*[0] * (bits is not None))
    except TypeError as error:
        raise ValueError(
            f"{rule.__name__}: {error}; with bits the function takes a code and returns its value,"
            " without bits it takes nothing and returns all values"
        ) from None
    made = rule() if bits is None else map(rule, range(2**bits))
    return declare(rule.__name__, made.values if isinstance(made, NumberFormat) else made)


def declare(name: str, values: Iterable[float], where: str = "this declaration") -> NumberFormat:
    """Add a number format to NUMBER_FORMATS; the same table may be declared again. `where` says in
    errors where the values come from. Raises ValueError as `number_format` does."""
    number = NumberFormat(name=name, values=_checked(name, values))
    if not 1 / LARGEST <= number.largest:
        raise ValueError(
            f"the largest value of {name} is {number.largest}; multiply all of them by a factor,"
            " since scales divide by it"
        )
    lookup(number, torch.device("cpu"))  # refuses what loops cannot round to
    check_name(name)
    before = NUMBER_FORMATS.setdefault(name, lambda: number)()
    if before.values != number.values:
        pairs = enumerate(zip_longest(before.values, number.values))
        code, (ours, theirs) = next(one for one in pairs if one[1][0] != one[1][1])
        raise ValueError(
            f"{name} has {len(before.values)} values here and {len(number.values)} in {where}, and"
            f" value {code} is {ours} here and {theirs} there; rename one of the two"
        )
    return before


def declared_tables(formats: Iterable[str]) -> dict[str, list[float]]:
    """Return name -> values of the declared numbers in names and patterns of formats."""
    forms = {form for text in formats for form in format_choice(text).formats}
    names = {form.partition("/")[0] for form in forms} & NUMBER_FORMATS.keys() - BUILT_IN
    return {name: list(NUMBER_FORMATS[name]().values) for name in sorted(names)}


def _checked(name: str, given: Any) -> tuple[float, ...]:
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} gives {given!r}; it must give its values, such as -1, 0, 1")
    values = tuple(given)
    for code, value in enumerate(values):
        if not isinstance(value, Real) or isinstance(value, bool) or not abs(value) <= LARGEST:
            raise ValueError(
                f"value {code} of {name} is {value!r}; values are finite numbers, at most 2^64 in"
                " magnitude"
            )
    return tuple(map(float, values))


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a number format; give letters, digits, _ . and -, such as"
            " seven"
        )
    taken = {*BUILT_IN, *PRESETS, *SCALES}
    if name in taken:
        near = ", ".join(difflib.get_close_matches(name, taken))
        raise ValueError(
            f"{name} is a name of lsq's own (near it are {near}); choose another, such as my_{name}"
        )
