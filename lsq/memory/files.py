"""Files of `lsq plan`: buffers as MiniMalloc's CSV (github.com/google/minimalloc), plans as CSV and
JSON."""

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from lsq.files import write_text
from lsq.memory.planner import LARGEST, Buffer, Plan

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "gaps")
ALIASES = {"buffer": "id", "buffer_id": "id", "begin": "lower", "start": "lower", "end": "upper"}
"""MiniMalloc's other names of columns. A life includes the operation `end` and ends before
`upper`."""
NUMBER = re.compile("-?[0-9]+")
"""A whole number; int() would take digits of every script, spaces and underscores as well."""
TOO_LONG = 100
"""Characters that no allowed number has."""


def read_buffers(path: Path, alignment: int = 1) -> list[Buffer]:
    """Read `id,lower,upper,size[,alignment][,offset]`; a buffer's last operation is upper - 1.

    Args:
        path: the file.
        alignment: bytes, of rows that give none.

    Raises:
        ValueError: the file is empty, or a column or a row is wrong; the message names the line.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            if rows.fieldnames is None:
                raise ValueError(
                    f"{path} is empty; give a heading, {','.join(REQUIRED)}, and a row for each"
                    " buffer"
                )
            inclusive = "end" in rows.fieldnames
            rows.fieldnames = _columns(rows.fieldnames, path)
            buffers, lines = [], {}
            for row in rows:
                buffer = _buffer(row, alignment, inclusive, f"{path}, line {rows.line_num}")
                if buffer.name in lines:
                    raise ValueError(
                        f"{path}, line {rows.line_num}: id {buffer.name!r} stands in line"
                        f" {lines[buffer.name]} already"
                    )
                lines[buffer.name] = rows.line_num
                buffers.append(buffer)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}, line {rows.line_num}: this is not a CSV file ({error})"
            ) from error
    if not buffers:
        raise ValueError(f"{path} has no buffers; give one row {','.join(REQUIRED)} for each")
    return buffers


def _columns(heading: Sequence[str], path: Path) -> list[str]:
    """The columns of a heading by their first names."""
    found = [ALIASES.get(name, name) for name in heading]
    missing = [name for name in REQUIRED if name not in found]
    unknown = [name for name in found if name not in (*REQUIRED, *OPTIONAL)]
    twice = [name for name in found if found.count(name) > 1]
    faults = {"no column": missing, "unknown column": unknown, "twice the column": twice[:1]}
    for fault, names in faults.items():
        if names:
            raise ValueError(
                f"{path}, line 1: {fault} {', '.join(names)} in {','.join(heading)!r}; "
                f"the heading must be {','.join(REQUIRED)} and may have alignment and offset"
            )
    return found


def _buffer(row: dict[str, str | None], alignment: int, inclusive: bool, where: str) -> Buffer:
    if None in row or any(row[name] in (None, "") for name in REQUIRED):
        raise ValueError(f"{where}: the row has not as many values as the heading has columns")
    numbers = {"alignment": alignment, "offset": None}
    for name in ("lower", "upper", "size", "alignment", "offset"):
        if name in REQUIRED or row.get(name):
            numbers[name] = _number(row[name], name, where)
    if row.get("gaps"):
        raise ValueError(
            f"{where}: buffer {row['id']!r} has gaps, {row['gaps']!r}, which lsq plan does not"
            " know; clear them, which may need more memory, or give each part of the life a row of"
            " its own, if it may lie at different offsets"
        )
    numbers["upper"] += inclusive
    if numbers["upper"] <= numbers["lower"]:
        raise ValueError(
            f"{where}: upper is {numbers['upper']}; it must be above lower, which is"
            f" {numbers['lower']}"
        )
    try:
        return Buffer(
            name=row["id"],
            size=numbers["size"],
            first=numbers["lower"],
            last=numbers["upper"] - 1,
            alignment=numbers["alignment"],
            offset=numbers["offset"],
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _number(text: str, name: str, where: str) -> int:
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{where}: {name} is {text!r}; it must be a whole number")
    value = int(text) if len(text) < TOO_LONG else math.inf
    if abs(value) > LARGEST:
        raise ValueError(f"{where}: {name} is {text[:TOO_LONG]}; it must be at most 2^62")
    return value


def write_plan(plan: Plan, path: Path) -> None:
    """Write `id,offset`, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("id", "offset"), *plan.offsets.items()])
    write_text(path, text.getvalue())


def save_plan(plan: Plan, path: Path) -> None:
    """Write all fields of a plan as JSON, whole or not at all."""
    write_text(path, json.dumps(dataclasses.asdict(plan), indent=1) + "\n")
