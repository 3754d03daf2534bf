"""A picture of errors over bits, with what no format can beat."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsq import files
from lsq.errors.bounds import BOUNDS, lloyd_max
from lsq.errors.table import PLURALS, Errors

MARKERS, COLOURS = "osD^vPX", 10
"""So many have no common divisor: 70 formats look different."""
STYLES = {"gaussian": "-", "laplacian": "--"}
LLOYD_BITS = range(1, 5)  # more take seconds to find


def draw(errors: Errors, path: Path, title: str = "") -> None:
    """Draw a point for each format, the medians of each kind of tensors in a panel of its own.

    Lines: the rate-distortion limit of a Gaussian and Shannon's of a Laplacian; dots, the best codebook for each value
    by itself (Lloyd-Max). Formats without any error are left out.

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
    figure = Figure(figsize=(5.5 * len(errors.kinds) + 2.5, 5.5), layout="constrained")
    panels = figure.subplots(1, len(errors.kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, errors.kinds, strict=True):
        _panel(axes, errors, kind)
    panels[0].set_ylabel("signal-to-noise, dB (median)")
    figure.suptitle(title)
    found = [pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in found}
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize="small")
    files.write(path, lambda file: figure.savefig(file, dpi=150, format=kind_of_file))


def _panel(axes: Axes, errors: Errors, kind: str) -> None:
    medians = errors.medians(kind)
    for one in medians:
        if math.isfinite(one.signal_to_noise):
            number = errors.formats.index(one.format)
            marker, colour = MARKERS[number % len(MARKERS)], f"C{number % COLOURS}"
            axes.plot([one.bits], [one.signal_to_noise], marker, color=colour, alpha=0.8, label=one.format)
    most = math.ceil(max(one.bits for one in medians))
    for source, bound in BOUNDS.items():
        name, style = source.capitalize(), STYLES[source]
        axes.plot([1, most], [bound(1), bound(most)], style, color="black", linewidth=1, label=f"{name}: limit")
        bits = [number for number in LLOYD_BITS if number <= most]
        found = [lloyd_max(source, number) for number in bits]
        axes.plot(bits, found, style, color="grey", marker=".", linewidth=0.8, label=f"{name}: Lloyd-Max")
    count = sum(one.kind == kind and not one.problem for one in errors.entries)
    axes.set_title(f"{PLURALS[kind]} ({count})")
    axes.set_xlabel("bits per value, scales counted")
    axes.grid(alpha=0.25)
