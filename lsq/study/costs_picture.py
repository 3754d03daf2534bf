"""A picture of what formats cost in loss: over the tensors of a model, and as estimated."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from lsq import extras, files
from lsq.study.costs import KINDS, Costs
from lsq.study.costs_table import ESTIMATES, correlation
from lsq.study.table import PLURALS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = dict(zip(KINDS, "ox", strict=True))
MOST_NAMES = 80
"""More are not written below the picture."""
DECADES = 4
"""Of the axes that are logarithmic, below the largest cost; nearer to zero they are linear, so that
costs below zero have their places, too.
"""


def draw_costs(costs: Costs, path: Path) -> None:
    """Draw measured costs over the tensors, formats in colours, and estimates over measured costs.

    Args:
        costs: those that are not finite have no place; the title of their panel counts them.
        path: picture to write, whole or not at all; its suffix chooses the format (.png, .svg,
            .pdf).

    Raises:
        ValueError: the format is unknown.
        OSError: it cannot be written.
    """
    names = list(dict.fromkeys(tensor.name for tensor in costs.tensors))
    shown = names if len(names) <= MOST_NAMES else []
    kinds = [kind for kind in KINDS if costs.of(kind)] or list(KINDS)
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 + 0.16 * len(shown), 4 + 3 * len(kinds)), layout="constrained")
    places = [["estimate", kind] for kind in kinds]
    panels = figure.subplot_mosaic(places, width_ratios=(1, 0.8 + 0.03 * len(shown)))
    found = [
        abs(one.cost) for tensor in costs.tensors for one in tensor.formats.values() if one.cost
    ]
    linear = 10.0 ** (math.floor(math.log10(max(found, default=1.0))) - DECADES)
    for axes in panels.values():
        axes.set_yscale("symlog", linthresh=linear)
    panels["estimate"].set_xscale("symlog", linthresh=linear)
    for kind in kinds:
        _over_tensors(panels[kind], costs, kind, names)
        panels[kind].set_xticks(
            range(len(shown)), shown if kind == kinds[-1] else [""] * len(shown), rotation=90
        )
        panels[kind].tick_params(axis="x", labelsize="x-small")
    _against_estimate(panels["estimate"], costs)
    figure.suptitle(f"Loss {costs.loss:.4f}: what it grows by with one tensor in another format")
    files.write(
        path, lambda file: figure.savefig(file, dpi=120, format=path.suffix.removeprefix("."))
    )


def _over_tensors(axes: "Axes", costs: Costs, kind: str, names: list[str]) -> None:
    for number, form in enumerate(costs.formats):
        found = {
            names.index(tensor.name): tensor.formats[form].cost
            for tensor in costs.of(kind)
            if tensor.formats[form].cost is not None
        }
        axes.plot(
            list(found),
            list(found.values()),
            MARKERS[kind],
            color=f"C{number}",
            alpha=0.8,
            markersize=5,
            label=form,
        )
    lost = sum(one.cost is None for tensor in costs.of(kind) for one in tensor.formats.values())
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(
        ylabel="measured cost",
        title=PLURALS[kind] + (f" ({lost} not finite, and not shown)" if lost else ""),
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _against_estimate(axes: "Axes", costs: Costs) -> None:
    second = ESTIMATES["second term"]
    ends: list[float] = []
    for number, form in enumerate(costs.formats):
        for kind in KINDS:
            found = [tensor.formats[form] for tensor in costs.of(kind)]
            pairs = [(one.cost, second(one)) for one in found if one.cost is not None]
            if pairs:
                axes.plot(
                    *zip(*pairs, strict=True),
                    MARKERS[kind],
                    color=f"C{number}",
                    alpha=0.8,
                    markersize=5,
                )
                ends += [value for pair in pairs for value in pair]
    if ends:
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
    kinds = [kind for kind in KINDS if costs.of(kind)]
    found = ", ".join(
        f"{PLURALS[kind]} {correlation(costs, kind, 'second term'):.2f}" for kind in kinds
    )
    axes.set(
        xlabel="measured cost", ylabel="estimate, second term", title=f"rank correlation:\n{found}"
    )
    axes.grid(alpha=0.25)
