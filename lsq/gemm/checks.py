"""Checks of values from anywhere: each raises a ValueError that begins with the name of the value."""

import math
from collections.abc import Iterable

_TEXT = 200
"""Longest name of a device, a library or a feature."""
_SHOWN = 60


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse what is not one of the allowed texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {shown(value)}; allowed: {', '.join(map(repr, allowed))}")


def check_whole(name: str, value: object, smallest: int, largest: int) -> None:
    """Refuse what is not a whole number in this range; True is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number from {smallest} to {largest}")


def check_number(name: str, value: object, largest: float) -> None:
    """Refuse what is not a finite number from 0 to `largest`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= largest or not math.isfinite(value):
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number from 0 to {largest:g}")


def check_text(name: str, value: object) -> None:
    """Refuse what is not a short text that can be printed."""
    if not isinstance(value, str) or not 1 <= len(value) <= _TEXT or not value.isprintable():
        raise ValueError(f"{name} is {shown(value)}; it must be a printable text of 1 to {_TEXT} characters")


def shown(value: object) -> str:
    """A value that may be anything, for a message: short, and printable everywhere."""
    text = ascii(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
