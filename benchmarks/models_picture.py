"""Draws training steps of Hugging Face's models: seconds and what is kept for backward, each side a
bar.

    python benchmarks/models_picture.py benchmarks/results/models_cpu_xeon_amx_2cores.json
    docs/models.png

`bench_models.py --picture FILE.png` measures and draws in one go.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = {"PyTorch": "0.5", "torchao": "C1", "SDNQ": "C2", "lsq": "C0"}
"""By the first word of a side's name."""
FIGURES = {
    "seconds": ("seconds a step", 1.0, ".2f"),
    "saved_bytes": ("megabytes kept for backward", 1e-6, ",.0f"),
}
"""Column -> its label, what it is multiplied by, and its format."""


def draw(rows: Sequence[Mapping], output: Path) -> None:
    """A row of panels for each figure, a panel for each model.

    Args:
        rows: of bench_models.py.
        output: the picture.

    Raises:
        ValueError: no side was measured.
    """
    ran = [row for row in rows if row["failed"] is None]
    if not ran:
        raise ValueError("a picture needs a side that ran; the rows say why none did")
    models = list(dict.fromkeys(row["model"] for row in ran))
    bars = max(sum(row["model"] == model for row in ran) for model in models)
    figure = Figure(figsize=(4.5 * len(models), 2 * (1 + 0.22 * bars)), layout="constrained")
    panels = figure.subplots(len(FIGURES), len(models), squeeze=False)
    for line, (column, (label, factor, form)) in zip(panels, FIGURES.items(), strict=True):
        for axes, model in zip(line, models, strict=True):
            chosen = {row["side"]: factor * row[column] for row in ran if row["model"] == model}
            places = range(len(chosen))
            colours = [COLOURS[name.split()[0]] for name in chosen]
            found = axes.barh(places, chosen.values(), color=colours)
            axes.bar_label(found, fmt=f"{{:{form}}}", padding=2, fontsize="small")
            axes.set_yticks(places, chosen, fontsize="small")
            axes.invert_yaxis()
            axes.set_xlabel(label)
            axes.set_title(model)
            axes.margins(x=0.15)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument(
        "figures", type=Path, metavar="FILE.json", help="what bench_models.py --json wrote"
    )
    options.add_argument("picture", type=Path, metavar="FILE.png", help="what to draw")
    given = options.parse_args()
    draw(json.loads(given.figures.read_text())["rows"], given.picture)


if __name__ == "__main__":
    main()
