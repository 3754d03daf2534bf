"""Pictures: errors of formats over bits, beside limits, and their costs in loss."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lsq import extras, files
from lsq.quant.numbers import lloyd_max_distortion
from lsq.study.costs import ESTIMATES, KINDS, Costs, correlation
from lsq.study.errors import BOUNDS, Errors, Median
from lsq.study.tensors import PLURALS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {"gaussian": "-", "laplacian": "--"}
MARKERS = dict(zip(KINDS, "ox", strict=True))
POINTS = {"alpha": 0.8, "markersize": 5}
LLOYD_BITS = range(1, 5)  # more take seconds to find
NEAR = 0.5
"""Bits: points so near to each other have their names in one column, to the right of all of them.
"""
ROWS = 36
"""Names that a panel has room for, one above the other."""
MOST_NAMES = 80
"""More names of tensors are not written below a picture."""
DECADES = 4
"""Of the logarithmic axes, below the largest cost; nearer to zero they are linear, so that costs
below zero are shown."""


def draw(errors: Errors, path: Path, title: str = "") -> None:
    """Draw a point with its name for each format, the medians of each kind of tensors in a panel,
    into a .png, .svg or .pdf; ValueError if there is nothing to draw, or the suffix is another.

    Lines: the rate-distortion limit of a Gaussian and Shannon's of a Laplacian; dots, the best
    codebook for each value by itself (Lloyd-Max). Formats without any error are left out.
    """
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
    """Draw measured costs over the tensors, formats in colours, and estimates over measured costs,
    into a .png, .svg or .pdf. The title of a panel counts costs that are not finite."""
    names = list(dict.fromkeys(tensor.name for tensor in costs.tensors))
    shown = names if len(names) <= MOST_NAMES else []
    kinds = [kind for kind in KINDS if costs.of(kind)] or list(KINDS)
    figure = _figure(9 + 0.16 * len(shown), 4 + 3 * len(kinds))
    panels = figure.subplot_mosaic(
        [["estimate", kind] for kind in kinds], width_ratios=(1, 0.8 + 0.03 * len(shown))
    )
    magnitudes = [
        abs(cost.cost) for tensor in costs.tensors for cost in tensor.formats.values() if cost.cost
    ]
    linear = 10.0 ** (math.floor(math.log10(max(magnitudes, default=1.0))) - DECADES)
    for axes in panels.values():
        axes.set_yscale("symlog", linthresh=linear)
    panels["estimate"].set_xscale("symlog", linthresh=linear)
    for kind in kinds:
        _over_tensors(panels[kind], costs, kind, names)
        labels = shown if kind == kinds[-1] else [""] * len(shown)
        panels[kind].set_xticks(range(len(shown)), labels, rotation=90)
        panels[kind].tick_params(axis="x", labelsize="x-small")
    _against_estimate(panels["estimate"], costs)
    figure.suptitle(f"Loss {costs.loss:.4f}: what it grows by with one tensor in another format")
    _write(figure, path, dpi=120)


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
    """Group medians that are near to each other, each group from the lowest to the highest."""
    columns: list[list[Median]] = []
    for median in sorted(medians, key=lambda median: median.bits):
        if columns and median.bits - columns[-1][-1].bits <= NEAR:
            columns[-1].append(median)
        else:
            columns.append([median])
    return [sorted(points, key=lambda median: median.signal_to_noise) for points in columns]


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Move rising heights apart by `least`, as far up as down."""
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
        axes.plot(list(points), list(points.values()), MARKERS[kind], **options)
    lost = sum(cost.cost is None for tensor in costs.of(kind) for cost in tensor.formats.values())
    axes.axhline(0, color="black", linewidth=0.8)
    title = PLURALS[kind] + (f" ({lost} not finite, and not shown)" if lost else "")
    axes.set(ylabel="measured cost", title=title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _against_estimate(axes: "Axes", costs: Costs) -> None:
    second, ends = ESTIMATES["second term"], []
    for number, form in enumerate(costs.formats):
        for kind in KINDS:
            of_form = [tensor.formats[form] for tensor in costs.of(kind)]
            pairs = [(cost.cost, second(cost)) for cost in of_form if cost.cost is not None]
            if pairs:
                x, y = zip(*pairs, strict=True)
                axes.plot(x, y, MARKERS[kind], color=f"C{number}", **POINTS)
                ends += [value for pair in pairs for value in pair]
    if ends:
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
    correlations = ", ".join(
        f"{PLURALS[kind]} {correlation(costs, kind, 'second term'):.2f}"
        for kind in KINDS
        if costs.of(kind)
    )
    axes.set(
        xlabel="measured cost",
        ylabel="estimate, second term",
        title=f"rank correlation:\n{correlations}",
    )
    axes.grid(alpha=0.25)
