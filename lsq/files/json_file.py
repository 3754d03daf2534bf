"""Reads JSON from untrusted files into dataclasses that check themselves.

An error is one ValueError that says where: "file.json: entries[12].key.m is 0; it must be ...".
"""

import dataclasses
import json
import math
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from lsq import files

LARGEST_FILE = 16 * 2**20
_LONGEST_TEXT = 200
"""Characters of the name of a device, a library or a feature."""
_SHOWN = 60

Built = TypeVar("Built")


def read(path: Path, build: Callable[[Any], Built], remedy: str) -> Built:
    """Return what `build` makes of the content of a file.

    Args:
        path: the file.
        build: checks the content; raises ValueError, beginning with the path of the wrong value.
        remedy: ends the message: what to do about a wrong file.

    Raises:
        ValueError: the file is too large or not JSON, has a field twice or a number that is not
            finite, or `build` refuses it.
    """
    try:
        return build(_parse(_content(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error} ({remedy})") from None


def write(path: Path, head: dict[str, Any], name: str, lines: list[dict[str, Any]]) -> None:
    """Write an object, whole or not at all: fields of `head`, then list `name`, one item a line."""
    fields = [
        f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()
    ]
    items = ",\n".join("  " + json.dumps(line, allow_nan=False) for line in lines)
    fields.append(f" {json.dumps(name)}: [\n{items}\n ]" if lines else f" {json.dumps(name)}: []")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, "{\n" + ",\n".join(fields) + "\n}\n")


def record(
    made: type[Built], value: Any, path: str, **converters: Callable[[Any, str], Any]
) -> Built:
    """Make a dataclass from an object with its fields; fields with a default may be missing.

    Args:
        made: a dataclass that checks itself; its errors begin with the name of the field.
        value: the object; anything else raises ValueError.
        path: where the object stands in the file; "" for the whole file.
        converters: field -> makes its value from the content and its path.
    """
    fields = dataclasses.fields(made)
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    check_fields(value, needed, path, allowed=[field.name for field in fields])
    values = dict(value)
    for name, convert in converters.items():
        if name in values:
            values[name] = convert(value[name], within(path, name))
    try:
        return made(**values)
    except ValueError as error:
        raise ValueError(within(path, str(error))) from None


def check_fields(
    value: Any, needed: list[str], path: str, allowed: list[str] | None = None
) -> None:
    """Raise ValueError unless `value` is an object with all `needed` and only `allowed` fields."""
    where = path or "the content"
    if not isinstance(value, dict):
        raise ValueError(
            f"{where} is {shown(value)}; it must be an object with {', '.join(needed)}"
        )
    unknown = sorted(set(value) - set(allowed or needed))
    if unknown:
        raise ValueError(
            f"{where} has the unknown field {shown(unknown[0])}; allowed:"
            f" {', '.join(allowed or needed)}"
        )
    missing = [name for name in needed if name not in value]
    if missing:
        raise ValueError(f"{where} has no field {missing[0]!r}; needed: {', '.join(needed)}")


def sequence(value: Any, path: str, convert: Callable[[Any, str], Built]) -> tuple[Built, ...]:
    """Convert each item of a list. Raises ValueError: `value` is no list."""
    if not isinstance(value, list):
        raise ValueError(f"{path} is {shown(value)}; it must be a list")
    return tuple(convert(item, f"{path}[{number}]") for number, item in enumerate(value))


def within(path: str, name: str) -> str:
    """Return the path of the field `name` of the object at `path`."""
    return f"{path}.{name}" if path else name


def _content(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait
        raise ValueError("this is not a regular file")
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(
            f"the file is larger than {LARGEST_FILE} bytes, which is the most that is read"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"this is no text in UTF-8 (byte {error.start})") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"this is not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
        ) from None
    except RecursionError:
        raise ValueError("objects and lists stand too deep within one another") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the field {shown(name)} stands twice in one object; remove one")
        seen.add(name)
    return dict(pairs)


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number in these files; it must be finite")


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of the allowed texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {shown(value)}; allowed: {', '.join(map(repr, allowed))}")


def check_whole(name: str, value: object, smallest: int, largest: int) -> None:
    """Raise ValueError unless the value is a whole number in this range; True and False are not."""
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
        raise ValueError(
            f"{name} is {shown(value)}; it must be a whole number from {smallest} to {largest}"
        )


def check_number(name: str, value: object, largest: float) -> None:
    """Raise ValueError unless the value is a finite number from 0 to `largest`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= largest or not math.isfinite(value):
        raise ValueError(
            f"{name} is {shown(value)}; it must be a finite number from 0 to {largest:g}"
        )


def check_text(name: str, value: object) -> None:
    """Raise ValueError unless the value is a short printable text."""
    is_text = isinstance(value, str) and 1 <= len(value) <= _LONGEST_TEXT and value.isprintable()
    if not is_text:
        raise ValueError(
            f"{name} is {shown(value)}; it must be a printable text of 1 to {_LONGEST_TEXT}"
            " characters"
        )


def shown(value: object) -> str:
    """Show any value in a message: short, and printable everywhere."""
    plain = isinstance(value, (str, int, float, bool, type(None)))
    text = ascii(value) if plain else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
