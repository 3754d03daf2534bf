"""A picture of what formats cost in loss: over the tensors of a model, and as estimated."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsq.errors.costs import KINDS, Costs
from lsq.errors.costs_table import ESTIMATES, correlation
from lsq.errors.table import PLURALS

MARKERS = dict(zip(KINDS, "ox", strict=True))
MOST_NAMES = 80
"""More are not written below the picture."""


def draw_costs(costs: Costs, path: Path) -> None:
    """Draw measured costs over the tensors, formats in colours, and estimates over measured costs.

    Args:
        costs: those at or below zero are left out: both axes are logarithmic.
        path: picture to write; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: the format is unknown.
        OSError: it cannot be written.
    """
    names = list(dict.fromkeys(tensor.name for tensor in costs.tensors))
    shown = names if len(names) <= MOST_NAMES else []
    figure = Figure(figsize=(8 + 0.18 * max(len(shown), 20), 7), layout="constrained")
    over, against = figure.subplots(1, 2, width_ratios=(1 + 0.04 * len(shown), 1))
    _over_tensors(over, costs, names)
    over.set_xticks(range(len(shown)), shown, rotation=90, fontsize="x-small")
    _against_estimate(against, costs)
    figure.suptitle(f"Loss {costs.loss:.4f}: what it grows by with one tensor in another format")
    figure.savefig(path, dpi=120)


def _over_tensors(axes: Axes, costs: Costs, names: list[str]) -> None:
    for number, form in enumerate(costs.formats):
        for kind in KINDS:
            found = {
                names.index(tensor.name): tensor.formats[form].cost for tensor in costs.of(kind)
                if (tensor.formats[form].cost or 0) > 0
            }  # fmt: skip
            if found:
                axes.plot(
                    list(found), list(found.values()), MARKERS[kind], color=f"C{number}", alpha=0.8, markersize=5,
                    label=f"{form}, {PLURALS[kind]}",
                )
    axes.set(yscale="log", ylabel="measured cost", xlabel="" if names else "tensors")
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(fontsize="x-small", ncols=2)


def _against_estimate(axes: Axes, costs: Costs) -> None:
    second = ESTIMATES["second term"]
    ends: list[float] = []
    for number, form in enumerate(costs.formats):
        for kind in KINDS:
            pairs = [(tensor.formats[form].cost or 0, second(tensor.formats[form])) for tensor in costs.of(kind)]
            pairs = [pair for pair in pairs if min(pair) > 0]
            if pairs:
                axes.plot(*zip(*pairs, strict=True), MARKERS[kind], color=f"C{number}", alpha=0.8, markersize=5)
                ends += [value for pair in pairs for value in pair]
    if ends:
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", linewidth=0.8)
    kinds = [kind for kind in KINDS if costs.of(kind)]
    found = ", ".join(f"{PLURALS[kind]} {correlation(costs, kind, 'second term'):.2f}" for kind in kinds)
    axes.set(
        xscale="log", yscale="log", xlabel="measured cost", ylabel="estimate, second term",
        title=f"rank correlation: {found}",
    )  # fmt: skip
    axes.grid(alpha=0.25)
