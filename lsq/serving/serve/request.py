"""What a client asks for: JSON such as {"text": ["one line", "another"], "beam": 4, "nbest": 2}."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from lsq.serving.decode import SearchOptions

OPTIONS = {field.name: field.type for field in fields(SearchOptions)}
TEXT, PREFIX = "text", "prefix"
EXAMPLE = '{"text": ["one line", "another line"]}'


@dataclass(frozen=True, kw_only=True)
class TranslationRequest:
    """A request, checked."""

    lines: list[str]
    prefixes: list[str]
    options: SearchOptions


def parse(body: bytes, defaults: SearchOptions) -> TranslationRequest:
    """Read a request.

    Args:
        defaults: options that it does not name.

    Raises:
        ValueError: it is not JSON, or something in it is wrong; says what.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is not JSON ({error}); send e.g. {EXAMPLE}") from None
    if not isinstance(given, dict) or TEXT not in given:
        raise ValueError(f'the request has no "{TEXT}"; send e.g. {EXAMPLE}')
    unknown = given.keys() - OPTIONS.keys() - {TEXT, PREFIX}
    if unknown:
        allowed = ", ".join((TEXT, PREFIX, *OPTIONS))
        raise ValueError(f"the request has {sorted(unknown)[0][:100]!r}; it may have {allowed}")
    lines = _texts(TEXT, given[TEXT])
    prefixes = _texts(PREFIX, given[PREFIX]) if PREFIX in given else [""] * len(lines)
    if len(prefixes) != len(lines):
        raise ValueError(
            f"there are {len(lines)} lines but {len(prefixes)} prefixes; give one for each line"
        )
    options = replace(
        defaults, **{name: _value(name, given[name]) for name in OPTIONS if name in given}
    )
    return TranslationRequest(lines=lines, prefixes=prefixes, options=options)


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'"{name}" must be a string or a list of strings')
    return texts


def _value(name: str, value: Any) -> Any:
    """An option's value as its field has it; JSON writes 1.0 as 1."""
    wanted = OPTIONS[name]
    if wanted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is too large") from None
    if type(value) is not wanted:
        shown = json.dumps(value)[:100]
        raise ValueError(f"{name} is {shown}; it must be of type {wanted.__name__}")
    return value
