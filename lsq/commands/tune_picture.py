"""A picture of a file of tuned products: how much faster they are, by shape."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lsq import extras
from lsq.gemm.configuration import Entry
from lsq.gemm.configuration_file import ConfigurationFile
from lsq.gemm.operations import TILED, TILED_ALONE
from lsq.gemm.product_key import MATMUL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP"


def draw(file: ConfigurationFile, path: Path) -> None:
    """Draw the speed-up of each product over the default, and over the product of floats.

    The suffix of `path` chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: the file has no entries, or the format is unknown.
        OSError: the picture cannot be written.
    """
    if not file.entries:
        raise ValueError("the file has no entries; there is nothing to draw")
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _panel(above, file.entries, lambda entry: entry.gain, "as run untuned")
    _panel(
        below,
        file.entries,
        lambda entry: entry.times.float / entry.times.chosen,
        "as the product of floats",
    )
    below.set_xlabel("multiplications and additions of the product")
    validators = file.validators
    figure.suptitle(
        f"{validators.device}, {validators.library} {validators.library_version}:"
        f" {len(file.entries)} products"
    )
    figure.savefig(path, dpi=150)


def _panel(
    axes: "Axes", entries: Sequence[Entry], gain: Callable[[Entry], float], compared: str
) -> None:
    for number, op in enumerate((*TILED, *TILED_ALONE, MATMUL)):
        chosen = [entry for entry in entries if entry.key.op == op]
        if not chosen:
            continue
        gains = [gain(entry) for entry in chosen]
        axes.plot(
            [entry.key.arithmetic for entry in chosen],
            gains,
            MARKERS[number],
            color=f"C{number}",
            alpha=0.7,
            markersize=5,
            markeredgewidth=0,
            label=f"{op}: {statistics.geometric_mean(gains):.2f} on average",
        )
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    lowest, highest = axes.get_ylim()
    if highest / lowest < 5:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"times as fast {compared}")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
