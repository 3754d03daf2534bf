"""Draws docs/models-quality.png: losses of the trainings of benchmarks/model_quality.py, from its
--json files."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

TITLES = {
    "text": "GPT-2 on text: bits a byte",
    "llama": "Llama on text: bits a byte",
    "digits": "ViT on digits: % right",
    "translation": "Marian on sentence pairs: bits a subword",
}
SCORES = {"text": "bits", "llama": "bits", "digits": "right", "translation": "bits"}
"""Task -> the score that is drawn."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("output", type=Path, metavar="FILE.png")
    options.add_argument("results", type=Path, nargs="+", metavar="FILE.json", help="of each task")
    given = options.parse_args()
    found = [json.loads(path.read_text()) for path in given.results]
    draw({one["conditions"]["task"]: one["curves"] for one in found}, given.output)


def draw(tasks: Mapping[str, list[dict]], path: Path) -> None:
    """Validation scores of each task: a line for each training, sides by colour.

    `tasks`: name -> curves.
    """
    figure = Figure(figsize=(1 + 4.5 * len(tasks), 4.2), layout="constrained")
    for axes, (task, curves) in zip(
        figure.subplots(1, len(tasks), squeeze=False)[0], tasks.items(), strict=True
    ):
        panel(axes, task, curves)
    figure.savefig(path, dpi=110)


def panel(axes: Axes, task: str, curves: list[dict]) -> None:
    """One task."""
    sides = list(dict.fromkeys(curve["side"] for curve in curves))
    for curve in curves:
        points = [(update, scores[SCORES[task]]) for update, scores in curve["validated"]]
        number = sides.index(curve["side"])
        first = curve is next(one for one in curves if one["side"] == curve["side"])
        label = curve["side"] if first else None
        axes.plot(
            *zip(*points, strict=True), color=f"C{number}", linewidth=1, alpha=0.8, label=label
        )
    axes.set(xlabel="updates", title=TITLES[task])
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main()
