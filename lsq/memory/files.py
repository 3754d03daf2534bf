"""Files of `lsq plan`: buffers in MiniMalloc's CSV (github.com/google/minimalloc); plans in CSV,
JSON and pictures."""

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lsq import extras
from lsq.files import write_text
from lsq.memory.buffers import LARGEST, Buffer, Plan, live_load

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "gaps")
ALIASES = {"buffer": "id", "buffer_id": "id", "begin": "lower", "start": "lower", "end": "upper"}
"""MiniMalloc's other names for columns. A life includes the operation `end`, but not `upper`."""
NUMBER = re.compile("-?[0-9]+")
"""A whole number; int() would also take digits of any script, spaces and underscores."""
TOO_LONG = 100
"""More characters than any allowed number has."""
MEBIBYTE = 2**20
COLOURED = 1000
"""Colours tell sizes apart from the largest down to the largest / COLOURED."""


def read_buffers(path: Path, alignment: int = 1) -> list[Buffer]:
    """Read `id,lower,upper,size[,alignment][,offset]`; a buffer's last operation is upper - 1.
    `alignment`: bytes, for rows without one. Raises ValueError: the file is empty, or a column or a
    row is wrong (the message names the line); OSError: the file cannot be read."""
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
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("id", "offset"), *plan.offsets.items()])
    write_text(path, text.getvalue())


def save_plan(plan: Plan, path: Path) -> None:
    write_text(path, json.dumps(dataclasses.asdict(plan), indent=1) + "\n")


def alive_at_peak(buffers: Iterable[Buffer]) -> tuple[int | None, list[Buffer]]:
    """Return the operation with the most live bytes, and the buffers alive there, the largest
    first.

    If no offset is fixed, their sizes add up to the lower bound.
    """
    buffers = list(buffers)
    curve = live_load(buffers)
    if not curve:
        return None, []
    time = max(curve, key=lambda point: point[1])[0]
    alive = [buffer for buffer in buffers if buffer.first <= time <= buffer.last and buffer.size]
    return time, sorted(alive, key=lambda buffer: -buffer.size)


def draw(buffers: Iterable[Buffer], plan: Plan, path: Path) -> None:
    """Draw the live load, and below it a rectangle for each buffer: operations by offsets, coloured
    by size. The suffix of `path` chooses the format (.png, .svg, .pdf). Raises ValueError: no
    buffer occupies bytes, or the format is unknown; OSError: the picture cannot be written."""
    extras.require("a picture", "study")
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    buffers = [buffer for buffer in buffers if buffer.size]
    if not buffers:
        raise ValueError("no buffer occupies any bytes; there is nothing to draw")
    figure = Figure(figsize=(11, 8), layout="constrained")
    load_axes, map_axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    times, loads = zip(*live_load(buffers), strict=True)
    load_axes.fill_between(
        times, [load / MEBIBYTE for load in loads], step="post", alpha=0.5, linewidth=0
    )
    # a thin line over a wide one, since both are mostly equal
    load_axes.axhline(plan.lower_bound / MEBIBYTE, color="0.6", linewidth=4, label="lower bound")
    load_axes.axhline(
        plan.peak / MEBIBYTE, color="C3", linewidth=0.8, linestyle="--", label="peak of the plan"
    )
    load_axes.set(ylabel="alive (MiB)", ylim=(0, None))
    counts = f"{len(plan.offsets):,} buffers over {times[-1] - times[0]:,} operations"
    load_axes.set_title(f"{counts}, {plan.method}: {plan.gap:.3%} above the lower bound")
    load_axes.legend(loc="lower right")
    largest = max(buffer.size for buffer in buffers) / MEBIBYTE
    lows = [plan.offsets[buffer.name] for buffer in buffers]
    sides = [
        (buffer.first, buffer.last + 1, low, low + buffer.size)
        for buffer, low in zip(buffers, lows, strict=True)
    ]
    rectangles = PolyCollection(
        [
            [(x, y / MEBIBYTE) for x, y in ((left, low), (right, low), (right, high), (left, high))]
            for left, right, low, high in sides
        ],
        array=[buffer.size / MEBIBYTE for buffer in buffers],
        norm=LogNorm(vmin=largest / COLOURED, vmax=largest, clip=True),
        cmap="viridis",
        edgecolors="white",
        linewidths=0.2,
    )
    map_axes.add_collection(rectangles)
    map_axes.set(xlabel="operation", ylabel="offset (MiB)", xlim=(times[0], times[-1]))
    map_axes.set_ylim(0, max(1, plan.peak) / MEBIBYTE)
    figure.colorbar(rectangles, ax=map_axes, label="size (MiB)")
    figure.savefig(path, dpi=120)
