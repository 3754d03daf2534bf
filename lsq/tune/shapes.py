"""Which products are tuned: numbers of tokens to do it for, and lists of products from files."""

import csv
import dataclasses
import re
from pathlib import Path
from typing import Any

from lsq.gemm import json_file
from lsq.gemm.checks import shown
from lsq.gemm.product_key import EXACT_TOKENS, TOKEN_STEP, ProductKey
from lsq.tune import coverage

_FIELDS = [field.name for field in dataclasses.fields(ProductKey)]
_NEEDED = ("op", "m", "n", "k")
_NUMBERS = ("m", "n", "k")
_DIGITS = re.compile("[0-9]{1,19}")
_REMEDY = "correct the file"
INT8_MULTIPLE = 16
"""What a GPU pads the inner dimension of an int8 product to."""


def token_counts(max_tokens: int, step: int) -> list[int]:
    """Numbers of tokens of batches, the largest first: the multiples of `step` up to `max_tokens`, and that itself.

    Raises:
        ValueError: the step is not a multiple of 32, in whose steps products are looked up.
    """
    if step % TOKEN_STEP:
        raise ValueError(f"step is {step}; products are looked up in steps of {TOKEN_STEP} tokens: use a multiple")
    return sorted({max_tokens, *range(step, max_tokens, step)}, reverse=True)


def generation_rows(beam: int, sentences: int) -> list[int]:
    """Rows of the steps of generation, the largest first: the beam times 1, 2, 4 ... sentences, as they finish."""
    counts = {sentences, *(2**power for power in range(sentences.bit_length()))}
    exact = {beam * count for count in counts if beam * count <= EXACT_TOKENS}
    return sorted({*exact, beam * sentences}, reverse=True)


def read_keys(path: Path) -> list[ProductKey]:
    """The products in a file: CSV with a heading, or a JSON list of objects, with the fields of ProductKey.

    op, m, n and k are needed; out, alpha and layout are otherwise those that the operation has on the CPU.

    Raises:
        ValueError: the file holds something else; the message says where and what is allowed.
        OSError: it cannot be read.
    """
    if path.suffix.lower() == ".json":
        keys = json_file.read(path, lambda content: json_file.sequence(content, "the list", _key), _REMEDY)
    else:
        keys = _csv_keys(path)
    if not keys:
        raise ValueError(f"{path} has no products; give one line {','.join(_NEEDED)} for each")
    return list(keys)


def _csv_keys(path: Path) -> list[ProductKey]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path}: line 1: no column {', '.join(missing)}; the heading is {','.join(_FIELDS)}")
            return [_csv_key(row, f"{path}: line {reader.line_num}") for row in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: line {reader.line_num}: this is not a CSV file ({error})") from None


def read_missed(path: Path) -> tuple[str, list[ProductKey]]:
    """("cpu" or "cuda", the products) that a run asked for and did not find, those that take longest first.

    Raises:
        ValueError, OSError: as `lsq.tune.coverage.read`.
    """
    report = coverage.read(path)
    return report.kind, [line.key for line in report.missed]


def for_device(key: ProductKey, kind: str) -> ProductKey:
    """The same product as a device of this kind runs it: int8 on a GPU as "nt", with a padded inner dimension."""
    if kind == "cpu" or key.dtype != "int8":
        return key
    return dataclasses.replace(key, layout="nt", k=-(-key.k // INT8_MULTIPLE) * INT8_MULTIPLE)


def _csv_key(row: dict[str | None, Any], place: str) -> ProductKey:
    if None in row or None in row.values():
        raise ValueError(f"{place}: the heading and this line have different numbers of columns")
    values: dict[str, Any] = {name: text.strip() for name, text in row.items() if text.strip()}
    for name in _NUMBERS:
        if _DIGITS.fullmatch(values.get(name, "")):
            values[name] = int(values[name])
    try:
        return _key(values, "")
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _key(value: Any, place: str) -> ProductKey:
    where = place or "the line"
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object with {', '.join(_FIELDS)}")
    unknown = [name for name in value if name not in _FIELDS]
    missing = [name for name in _NEEDED if name not in value]
    if unknown or missing:
        wrong = f"unknown field {shown(unknown[0])}" if unknown else f"no field {missing[0]!r}"
        raise ValueError(f"{where} has {wrong}; needed: {', '.join(_NEEDED)}; allowed: {', '.join(_FIELDS)}")
    try:
        if value.get("dtype", "int8") != "int8":
            return ProductKey(**{"out": value["dtype"]} | value)
        usual = ProductKey.of(**{name: value[name] for name in _NEEDED})
        return dataclasses.replace(usual, **value)
    except ValueError as error:
        raise ValueError(json_file.within(place, str(error))) from None
