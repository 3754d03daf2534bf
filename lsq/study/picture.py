"""A picture of errors over bits, with what no format can beat."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lsq import extras, files
from lsq.study.bounds import BOUNDS, lloyd_max
from lsq.study.table import PLURALS, Errors, Median

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"gaussian": "-", "laplacian": "--"}
LLOYD_BITS = range(1, 5)  # more take seconds to find
NEAR = 0.5
"""Bits: points so near to each other have their names in one column, to the right of all of them.
"""
ROWS = 36
"""Names that a panel has room for, one above the other."""


def draw(errors: Errors, path: Path, title: str = "") -> None:
    """Draw a point for each format, with its name, the medians of each kind of tensors in a panel
    of its own.

    Lines: the rate-distortion limit of a Gaussian and Shannon's of a Laplacian; dots, the best
    codebook for each value by itself (Lloyd-Max). Formats without any error are left out.

    Args:
        errors: what was measured.
        path: of a .png, .svg or .pdf, written whole or not at all.
        title: above it.

    Raises:
        ValueError: there is nothing to draw, or the suffix is another.
        OSError: it cannot be written.
    """
    if not errors.kinds:
        raise ValueError("nothing was measured, so there is nothing to draw")
    kind_of_file = path.suffix.removeprefix(".")
    if kind_of_file not in ("png", "svg", "pdf"):
        raise ValueError(f"a picture is a .png, .svg or .pdf; {path.name} is none")
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(errors.kinds) + 2.5, 6.5), layout="constrained")
    panels = figure.subplots(1, len(errors.kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, errors.kinds, strict=True):
        _panel(axes, errors, kind)
    panels[0].set_ylabel("signal-to-noise, dB (median)")
    figure.suptitle(title)
    found = [
        pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    handles = {label: handle for handle, label in found}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize="small")
    files.write(path, lambda file: figure.savefig(file, dpi=150, format=kind_of_file))


def _panel(axes: "Axes", errors: Errors, kind: str) -> None:
    medians = errors.medians(kind)
    most = math.ceil(max(one.bits for one in medians))
    finite = [one for one in medians if math.isfinite(one.signal_to_noise)]
    axes.plot(
        [one.bits for one in finite],
        [one.signal_to_noise for one in finite],
        "o",
        alpha=0.8,
        markersize=5,
    )
    for points in _columns(finite):
        place = max(one.bits for one in points) + NEAR / 2
        heights = _apart([one.signal_to_noise for one in points], BOUNDS["gaussian"](most) / ROWS)
        for one, height in zip(points, heights, strict=True):
            axes.annotate(
                one.format,
                (one.bits, one.signal_to_noise),
                (place, height),
                fontsize="x-small",
                va="center",
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},
            )
    axes.set_xlim(0.5, most + 2)  # with room for names
    for source, bound in BOUNDS.items():
        name, style = source.capitalize(), STYLES[source]
        axes.plot(
            [1, most],
            [bound(1), bound(most)],
            style,
            color="black",
            linewidth=1,
            label=f"{name}: limit",
        )
        bits = [number for number in LLOYD_BITS if number <= most]
        found = [lloyd_max(source, number) for number in bits]
        axes.plot(
            bits, found, style, color="grey", marker=".", linewidth=0.8, label=f"{name}: Lloyd-Max"
        )
    count = sum(one.kind == kind and not one.problem for one in errors.entries)
    axes.set_title(f"{PLURALS[kind]} ({count})")
    axes.set_xlabel("bits per value, scales counted")
    axes.grid(alpha=0.25)


def _columns(medians: Sequence[Median]) -> list[list[Median]]:
    """Those that are near to each other together, from the lowest to the highest."""
    found: list[list[Median]] = []
    for one in sorted(medians, key=lambda one: one.bits):
        if found and one.bits - found[-1][-1].bits <= NEAR:
            found[-1].append(one)
        else:
            found.append([one])
    return [sorted(points, key=lambda one: one.signal_to_noise) for points in found]


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Rising heights, moved apart by so much at least, and as far up as down."""
    found = []
    for height in heights:
        found.append(max(height, found[-1] + least) if found else height)
    moved = statistics.mean(found) - statistics.mean(heights)
    return [height - moved for height in found]
