"""Requests in JSON, {"text": ["one line", "another"], "beam": 4, "nbest": 2}, and their limits."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from lsq.config import require_positive
from lsq.serving.search_options import SearchOptions

OPTIONS = {field.name: field.type for field in fields(SearchOptions)}
TEXT, PREFIX = "text", "prefix"
EXAMPLE = '{"text": ["one line", "another line"]}'


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a service; ValueError if one is not above 0."""

    queue: int = 4096
    """Most sentences of all requests that wait at the same time."""
    beam: int = 16
    """The largest beam that a request may ask for."""
    words: int = 512
    """The longest translation that a request may ask for, in subwords."""

    def __post_init__(self) -> None:
        for field in fields(self):
            require_positive(field.name, getattr(self, field.name))

    def check(self, options: SearchOptions, longest_source: int) -> None:
        """Raise ValueError if options exceed the limits for sources of `longest_source` words."""
        if options.beam > self.beam:
            raise ValueError(f"beam is {options.beam}; this service takes {self.beam} at most")
        most = self.words - options.max_len_a * longest_source
        if options.max_len_b > most:
            raise ValueError(
                f"max_len_a * {longest_source} + max_len_b allows longer translations than this"
                f" service's longest, {self.words} words; with this max_len_a of"
                f" {options.max_len_a:g}, max_len_b may be {max(most, 0):g}"
            )


def parse(body: bytes, defaults: SearchOptions) -> tuple[list[str], list[str], SearchOptions]:
    """Return (lines, prefixes, options) of a request; `defaults` are the options that it does not
    name. ValueError says what is wrong."""
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
    options = {name: _value(name, given[name]) for name in OPTIONS if name in given}
    return lines, prefixes, replace(defaults, **options)


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'"{name}" must be a string or a list of strings')
    return texts


def _value(name: str, value: Any) -> Any:
    """Convert an option to the type of its field; JSON writes 1.0 as 1."""
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
