"""Table and picture of the runs that run.sh made: BLEU and validation loss of each format, over its bits."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from lsq.commands import logs
from lsq.quant.numbers import scaled_format

SHAPE = (512, 128)
"""A weight of the feed-forward block: its format's bits a value are those that are shown, scales counted."""
STORED_BY_PRODUCTS = {"float": 32.0, "float-again": 32.0, "int8": 8.25, "int6": 6.25, "int4": 4.5}
"""Bits of a weight's value for what has a product of its own: codes, a multiplier for 32 of int4, a scale for a row."""


def collect(output: Path) -> dict[str, list[dict]]:
    """Kind of run -> the results of its seeds, in the order of the first seed's trainings."""
    found: dict[str, list[dict]] = defaultdict(list)
    paths = sorted(output.glob("*/*/results.json"), key=lambda path: path.stat().st_mtime)
    for path in paths:
        found[path.parent.name].append(json.loads(path.read_text(encoding="utf-8")))
    return dict(found)


def bits(kind: str, results: dict) -> float:
    """Of a value of a weight."""
    if kind in STORED_BY_PRODUCTS:
        return STORED_BY_PRODUCTS[kind]
    return scaled_format(results["options"]["--lsq-weight-format"]).bits_per_value(SHAPE)


def table(runs: dict[str, list[dict]]) -> str:
    """Markdown: each kind with its figures for every seed, the means, and the difference to float that went on."""
    titles = ("training", "bits of a weight", "BLEU", "mean", "to float", "validation loss", "seconds")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    baseline = mean(run["bleu"] for run in runs["float-again"])
    for kind, results in runs.items():
        bleu = mean(run["bleu"] for run in results)
        columns = [
            kind, f"{bits(kind, results[0]):.2f}", _join(results, "bleu", ".2f"), f"{bleu:.2f}",
            "" if kind == "float" else f"{bleu - baseline:+.2f}", _join(results, "best_validation_loss", ".3f"),
            _join(results, "training_seconds", ".0f"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """A point for each format: mean BLEU over the bits of a weight; a line for float that went on."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.axhline(mean(run["bleu"] for run in runs["float-again"]), color="0.6", linestyle="--", label="float")
    for kind, results in runs.items():
        if not kind.startswith("float"):
            place = bits(kind, results[0]), mean(run["bleu"] for run in results)
            axes.plot(*place, "o")
            axes.annotate(kind, place, textcoords="offset points", xytext=(5, 3))
    axes.set(xlabel="bits of a weight's value, scales counted", ylabel="BLEU")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _join(results: list[dict], key: str, form: str) -> str:
    return " / ".join(format(run[key], form) for run in results)


def main() -> None:
    logs.configure()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the folder that run.sh wrote")
    output = parser.parse_args().output
    runs = collect(output)
    if "float-again" not in runs:
        parser.error(f"no results of recipes/formats/run.sh in {output}")
    print(table(runs))
    draw(runs, output / "formats.png")


if __name__ == "__main__":
    main()
