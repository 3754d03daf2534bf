"""JSON from files that nobody vouches for: limited in size, without duplicates or NaN, read into checked dataclasses.

Whatever is wrong is one ValueError that says where: "file.json: entries[12].key.m is 0; it must be ...".
"""

import dataclasses
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lsq import files
from lsq.gemm.checks import shown

LARGEST_FILE = 16 * 2**20
DEEPEST = 8
"""How many objects and lists may stand within one another."""
_LONGEST_NUMBER = 40

Built = TypeVar("Built")


def read(path: Path, build: Callable[[Any], Built], remedy: str) -> Built:
    """What `build` makes of the content of a file.

    Args:
        path: the file.
        build: checks the content; raises a ValueError that begins with the place of what is wrong.
        remedy: what to do about a file that is wrong, for the message.

    Raises:
        ValueError: the file is too large, not JSON, or not what `build` takes.
        OSError: it cannot be read.
    """
    try:
        return build(_parse(_content(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error} ({remedy})") from None


def write(path: Path, head: dict[str, Any], name: str, lines: list[dict[str, Any]]) -> None:
    """Write an object, whole or not at all: the fields of `head` and a list, each on lines of their own.

    Raises:
        OSError: it cannot be written.
    """
    fields = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()]
    items = ",\n".join("  " + json.dumps(line, allow_nan=False) for line in lines)
    fields.append(f" {json.dumps(name)}: [\n{items}\n ]" if lines else f" {json.dumps(name)}: []")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, "{\n" + ",\n".join(fields) + "\n}\n")


def record(made: type[Built], value: Any, place: str, **converters: Callable[[Any, str], Any]) -> Built:
    """A dataclass from an object that has exactly its fields.

    Args:
        made: a dataclass that checks itself, with errors that begin with the name of the field.
        value: what should be the object.
        place: where it stands; "" for the whole file.
        converters: field -> what makes its value, given the content and its place.

    Raises:
        ValueError: no object, a field missing or unknown, or the dataclass refuses a value.
    """
    names = [field.name for field in dataclasses.fields(made)]
    check_fields(value, names, place)
    values = dict(value)
    for name, convert in converters.items():
        values[name] = convert(value[name], within(place, name))
    try:
        return made(**values)
    except ValueError as error:
        raise ValueError(within(place, str(error))) from None


def check_fields(value: Any, names: list[str], place: str) -> None:
    """Refuse what is not an object with exactly these fields.

    Raises:
        ValueError: it is not.
    """
    where = place or "the content"
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object with {', '.join(names)}")
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ValueError(f"{where} has the unknown field {shown(unknown[0])}; allowed: {', '.join(names)}")
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{where} has no field {missing[0]!r}; needed: {', '.join(names)}")


def sequence(value: Any, place: str, convert: Callable[[Any, str], Built]) -> tuple[Built, ...]:
    """The items of a list, each converted.

    Raises:
        ValueError: no list, or an item is wrong.
    """
    if not isinstance(value, list):
        raise ValueError(f"{place} is {shown(value)}; it must be a list")
    return tuple(convert(item, f"{place}[{number}]") for number, item in enumerate(value))


def within(place: str, name: str) -> str:
    """The place of a field of what stands at `place`."""
    return f"{place}.{name}" if place else name


def _content(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait
        raise ValueError("this is not a regular file")
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"the file is larger than {LARGEST_FILE} bytes, which is the most that is read")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"this is no text in UTF-8 (byte {error.start})") from None


def _parse(text: str) -> Any:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_number(int),
            parse_float=_number(float),
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(value)
    return value


def _too_deep() -> str:
    return f"objects and lists stand more than {DEEPEST} deep within one another"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    raise ValueError(_too_deep())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field {shown(name)} stands twice in one object; remove one")
        found[name] = value
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number in these files; it must be finite")


def _number(convert: Callable[[str], Built]) -> Callable[[str], Built]:
    def checked(text: str) -> Built:
        if len(text) > _LONGEST_NUMBER:
            raise ValueError(f"the number {text[:20]}... is {len(text)} characters long; at most {_LONGEST_NUMBER}")
        return convert(text)

    return checked
