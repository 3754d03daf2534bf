"""Files of the planner: MiniMalloc's CSV (github.com/google/minimalloc), plans as CSV and as JSON."""

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from lsq.files import write_text
from lsq.memory.buffer import LARGEST
from lsq.planner.buffer import Buffer, Plan

REQUIRED = ("id", "lower", "upper", "size")
NUMBER = re.compile("-?[0-9]+")
"""What is taken for a whole number: int() takes digits of every script, spaces and underscores as well."""
TOO_LONG = 100
"""Characters; no number that is allowed has as many."""


def read_buffers(path: Path, alignment: int = 1) -> list[Buffer]:
    """Read `id,lower,upper,size[,alignment]`; a buffer lives on [lower, upper), so its last operation is upper - 1.

    Args:
        path: the file; further columns are ignored.
        alignment: bytes, of rows that give none.

    Raises:
        ValueError: the file is empty or a row is wrong; the message names its line.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            missing = [name for name in REQUIRED if name not in (rows.fieldnames or ())]
            if missing:
                heading = ",".join(rows.fieldnames or ())
                raise ValueError(
                    f"{path}, line 1: no column {', '.join(missing)} in {heading!r}; "
                    f"the heading must be {','.join(REQUIRED)} and may have alignment"
                )
            buffers, lines = [], {}
            for row in rows:
                buffer = _buffer(row, alignment, f"{path}, line {rows.line_num}")
                if buffer.name in lines:
                    raise ValueError(
                        f"{path}, line {rows.line_num}: id {buffer.name!r} stands in line {lines[buffer.name]} already"
                    )
                lines[buffer.name] = rows.line_num
                buffers.append(buffer)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {rows.line_num}: this is not a CSV file ({error})") from error
    if not buffers:
        raise ValueError(f"{path} has no buffers; give one row {','.join(REQUIRED)} for each")
    return buffers


def _buffer(row: dict[str, str | None], alignment: int, where: str) -> Buffer:
    if None in row or any(row[name] in (None, "") for name in REQUIRED):
        raise ValueError(f"{where}: the row has not as many values as the heading has columns")
    numbers = {"alignment": alignment}
    for name in ("lower", "upper", "size", "alignment"):
        if name in REQUIRED or row.get(name):
            numbers[name] = _number(row[name], name, where)
    if numbers["upper"] <= numbers["lower"]:
        raise ValueError(f"{where}: upper is {numbers['upper']}; it must be above lower, which is {numbers['lower']}")
    try:
        return Buffer(
            name=row["id"],
            size=numbers["size"],
            first=numbers["lower"],
            last=numbers["upper"] - 1,
            alignment=numbers["alignment"],
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
    """Write `id,offset,segment`, whole or not at all."""
    rows = [(name, offset, plan.segments[name]) for name, offset in plan.offsets.items()]
    write_text(path, _csv([("id", "offset", "segment"), *rows]))


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan with all it says as JSON, whole or not at all."""
    write_text(path, json.dumps(dataclasses.asdict(plan), indent=1) + "\n")


def _csv(rows: Iterable[Iterable]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
