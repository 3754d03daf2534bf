"""Pictures of formats: errors over bits, beside limits, and costs in loss over tensors."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lsq import extras, files
from lsq.quant.tables import lloyd_max_distortion
from lsq.study.allocation import METHODS, Allocation, Allocator
from lsq.study.costs import KINDS, Costs
from lsq.study.errors import BOUNDS, Errors, Median
from lsq.study.tensors import PLURALS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {"gaussian": "-", "laplacian": "--"}
POINTS = {"alpha": 0.8, "markersize": 5}
LLOYD_BITS = range(1, 5)  # more bits take seconds
NEAR = 0.5
"""In bits: points this near to each other have their names in one column to the right."""
ROWS = 36
MOST_NAMES = 80
SHOWN = 40
"""Last characters of a name below an axis."""
DECADES = 4
"""Decades of logarithmic axes below the largest cost; nearer to zero they are linear."""


def draw(errors: Errors, path: Path, title: str = "") -> None:
    """Draw medians of formats beside limits into a .png, .svg or .pdf, or raise ValueError."""
    if not errors.kinds:
        raise ValueError("nothing was measured, so there is nothing to draw")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a picture is a .png, .svg or .pdf; {path.name} is none")
    figure = _figure(6 * len(errors.kinds) + 2.5, 6.5)
    panels = figure.subplots(1, len(errors.kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, errors.kinds, strict=True):
        _panel(axes, errors, kind)
    panels[0].set_ylabel("signal-to-noise, dB (median)")
    figure.suptitle(title)
    lines = [
        pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    handles = {label: handle for handle, label in lines}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize="small")
    _write(figure, path, dpi=150)


def draw_costs(costs: Costs, path: Path) -> None:
    """Draw measured costs over tensors into a .png, .svg or .pdf; titles count infinite costs."""
    names = list(dict.fromkeys(tensor.name for tensor in costs.tensors))
    shown = names if len(names) <= MOST_NAMES else []
    kinds = [kind for kind in KINDS if costs.of(kind)] or list(KINDS)
    figure = _figure(6 + 0.16 * len(shown), 4 + 3 * len(kinds))
    every = [cost.cost for tensor in costs.tensors for cost in tensor.formats.values()]
    largest = max((abs(cost) for cost in every if cost), default=1.0)
    linear = 10.0 ** (math.floor(math.log10(largest)) - DECADES)
    panels = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    for axes, kind in zip(panels, kinds, strict=True):
        axes.set_yscale("symlog", linthresh=linear)
        _over_tensors(axes, costs, kind, names)
        labels = shown if kind == kinds[-1] else [""] * len(shown)
        axes.set_xticks(range(len(shown)), labels, rotation=90)
        axes.tick_params(axis="x", labelsize="x-small")
    figure.suptitle(f"Loss {costs.loss:.4f}: what it grows by with one tensor in another format")
    _write(figure, path, dpi=120)


def draw_front(allocator: Allocator, allocation: Allocation, path: Path) -> None:
    """Draw costs over mean bits: a front of all budgets for each method, uniform formats, and an
    allocation with the bits of its tensors below, into a .png, .svg or .pdf."""
    shown = [", ".join(one.part.names) for one in allocation.chosen]
    figure = _figure(7 + 0.12 * min(len(shown), MOST_NAMES), 8)
    above, below = figure.subplots(2, 1)
    drawn = []
    for method in METHODS:
        front = replace(allocator, method=method).front()
        steps = {"drawstyle": "steps-post"}  # a larger budget allows what a smaller one does
        above.plot(*_points(front), "-", label=f"mixes: {method}", **steps)
        drawn += front
    uniform = allocator.uniform()
    drawn += uniform.values()
    above.plot(*_points(uniform.values()), "o", color="black", label="uniform", **POINTS)
    for form, one in uniform.items():
        at = one.bits, one.cost
        above.annotate(form, at, (4, 4), textcoords="offset points", fontsize="x-small")
    above.plot(allocation.bits, allocation.cost, "*", color="C3", markersize=12, label="chosen")
    positive = all(one.cost > 0 for one in drawn)
    above.set(xlabel="mean bits of a value, scales included", ylabel=allocation.rule)
    above.set_yscale("log" if positive else "linear")
    above.margins(x=0.12)  # room for names
    above.grid(alpha=0.25)
    above.legend(fontsize="small")
    kinds = [one.part.kind for one in allocation.chosen]
    colors = [f"C{KINDS.index(kind)}" for kind in kinds]
    labels = [None if kind in kinds[:n] else PLURALS[kind] for n, kind in enumerate(kinds)]
    heights = [one.bits for one in allocation.chosen]
    below.bar(range(len(shown)), heights, color=colors, label=labels)
    below.margins(y=0.25)  # room for the legend
    below.legend(fontsize="small")
    named = shown if len(shown) <= MOST_NAMES else []
    below.set_xticks(range(len(named)), [name[-SHOWN:] for name in named], rotation=90)
    below.tick_params(axis="x", labelsize="xx-small")
    below.set(ylabel="bits of a value")
    _write(figure, path, dpi=120)


def _points(allocations: Iterable[Allocation]) -> tuple[list[float], list[float]]:
    return [one.bits for one in allocations], [one.cost for one in allocations]


def _figure(width: float, height: float) -> "Figure":
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _write(figure: "Figure", path: Path, dpi: int) -> None:
    form = path.suffix.removeprefix(".")
    files.write(path, lambda file: figure.savefig(file, dpi=dpi, format=form))


def _panel(axes: "Axes", errors: Errors, kind: str) -> None:
    medians = errors.medians(kind)
    most = math.ceil(max(median.bits for median in medians))
    finite = [median for median in medians if math.isfinite(median.signal_to_noise)]
    axes.plot([m.bits for m in finite], [m.signal_to_noise for m in finite], "o", **POINTS)
    for points in _columns(finite):
        x = max(median.bits for median in points) + NEAR / 2
        heights = _apart([m.signal_to_noise for m in points], BOUNDS["gaussian"](most) / ROWS)
        for median, height in zip(points, heights, strict=True):
            axes.annotate(
                median.format,
                (median.bits, median.signal_to_noise),
                (x, height),
                fontsize="x-small",
                va="center",
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},
            )
    axes.set_xlim(0.5, most + 2)  # with room for names
    for source, bound in BOUNDS.items():
        name, style = source.capitalize(), STYLES[source]
        ends, heights = [1, most], [bound(1), bound(most)]
        axes.plot(ends, heights, style, color="black", linewidth=1, label=f"{name}: limit")
        bits = [number for number in LLOYD_BITS if number <= most]
        heights = [-10 * math.log10(lloyd_max_distortion(source, number)) for number in bits]
        line = {"color": "grey", "marker": ".", "linewidth": 0.8, "label": f"{name}: Lloyd-Max"}
        axes.plot(bits, heights, style, **line)
    count = sum(entry.kind == kind and not entry.problem for entry in errors.entries)
    axes.set_title(f"{PLURALS[kind]} ({count})")
    axes.set_xlabel("bits per value, scales counted")
    axes.grid(alpha=0.25)


def _columns(medians: Sequence[Median]) -> list[list[Median]]:
    """Group medians that are near to each other; sort each group by signal-to-noise."""
    columns: list[list[Median]] = []
    for median in sorted(medians, key=lambda median: median.bits):
        if columns and median.bits - columns[-1][-1].bits <= NEAR:
            columns[-1].append(median)
        else:
            columns.append([median])
    return [sorted(points, key=lambda median: median.signal_to_noise) for points in columns]


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Move rising heights apart by at least `least`, and keep their mean."""
    apart = []
    for height in heights:
        apart.append(max(height, apart[-1] + least) if apart else height)
    moved = statistics.mean(apart) - statistics.mean(heights)
    return [height - moved for height in apart]


def _over_tensors(axes: "Axes", costs: Costs, kind: str, names: list[str]) -> None:
    for number, form in enumerate(costs.formats):
        points = {
            names.index(tensor.name): tensor.formats[form].cost
            for tensor in costs.of(kind)
            if tensor.formats[form].cost is not None
        }
        options = {"color": f"C{number}", "label": form, **POINTS}
        axes.plot(list(points), list(points.values()), "o", **options)
    lost = sum(cost.cost is None for tensor in costs.of(kind) for cost in tensor.formats.values())
    axes.axhline(0, color="black", linewidth=0.8)
    title = PLURALS[kind] + (f" ({lost} not finite, and not shown)" if lost else "")
    axes.set(ylabel="measured cost", title=title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
