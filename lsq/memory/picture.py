"""A picture of a plan, and the buffers that explain its peak."""

from collections.abc import Iterable
from pathlib import Path

from lsq import extras
from lsq.memory.planner import Buffer, Plan, live_load

MEBIBYTE = 2**20
COLOURED = 1000
"""Sizes down to the largest divided by this have colours of their own."""


def alive_at_peak(buffers: Iterable[Buffer]) -> tuple[int | None, list[Buffer]]:
    """The operation at which most bytes are alive, and the buffers alive then, the largest first.

    Without fixed offsets, their sum is the lower bound.
    """
    buffers = list(buffers)
    curve = live_load(buffers)
    if not curve:
        return None, []
    time = max(curve, key=lambda point: point[1])[0]
    alive = [buffer for buffer in buffers if buffer.first <= time <= buffer.last and buffer.size]
    return time, sorted(alive, key=lambda buffer: -buffer.size)


def draw(buffers: Iterable[Buffer], plan: Plan, path: Path) -> None:
    """Draw the live load, and below it a rectangle per buffer, operation by offset, coloured by
    size. The suffix of `path` chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: no buffer occupies bytes, or the format is unknown.
        OSError: the picture cannot be written.
    """
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
    # mostly equal: a thin line over a wide one
    load_axes.axhline(plan.lower_bound / MEBIBYTE, color="0.6", linewidth=4, label="lower bound")
    load_axes.axhline(
        plan.peak / MEBIBYTE, color="C3", linewidth=0.8, linestyle="--", label="peak of the plan"
    )
    load_axes.set(ylabel="alive (MiB)", ylim=(0, None))
    counts = f"{len(plan.offsets):,} buffers over {times[-1] - times[0]:,} operations"
    load_axes.set_title(f"{counts}, {plan.method}: {plan.gap:.3%} above the lower bound")
    load_axes.legend(loc="lower right")
    largest = max(buffer.size for buffer in buffers) / MEBIBYTE
    rectangles = PolyCollection(
        [_corners(buffer, plan.offsets[buffer.name]) for buffer in buffers],
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


def _corners(buffer: Buffer, offset: int) -> list[tuple[float, float]]:
    left, right = buffer.first, buffer.last + 1
    bottom, top = offset / MEBIBYTE, (offset + buffer.size) / MEBIBYTE
    return [(left, bottom), (right, bottom), (right, top), (left, top)]
