"""Table and picture of the runs of run.sh: BLEU and validation loss over bits."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from tabulate import tabulate

from lsq.commands import logs
from lsq.quant.numbers import scaled_format

SHAPE = (512, 128)
"""A weight of the feed-forward block, whose bits a value are shown, scales counted."""
STORED_BY_PRODUCTS = {"float": 32.0, "float-again": 32.0, "int8": 8.25, "int6": 6.25, "int4": 4.5}
"""Bits of a value with a product of its own: codes, a multiplier for 32 of int4, a row's scale."""


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
    """Format Markdown, by bits: each kind with its figures for every seed, and the means, beside
    float that went on."""
    baseline = mean(run["bleu"] for run in runs["float-again"])
    titles = "training,bits of a weight,BLEU,mean,to float,validation loss,seconds".split(",")
    rows = []
    for kind, results in sorted(runs.items(), key=lambda item: -bits(item[0], item[1][0])):
        bleu = mean(run["bleu"] for run in results)
        difference = "" if kind.startswith("float") else f"{bleu - baseline:+.2f}"
        rows.append(
            (
                kind,
                f"{bits(kind, results[0]):.2f}",
                _join(results, "bleu", ".2f"),
                f"{bleu:.2f}",
                difference,
                _join(results, "best_validation_loss", ".3f"),
                _join(results, "training_seconds", ".0f"),
            )
        )
    return tabulate(rows, titles, tablefmt="github", disable_numparse=True)


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw means of BLEU and of the validation loss over the bits of a weight; dashed: float that
    went on."""
    figure, places = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True)
    labels = {"bleu": "BLEU", "best_validation_loss": "validation loss"}
    for axes, (key, label) in zip(places, labels.items(), strict=True):
        means = {kind: mean(run[key] for run in results) for kind, results in runs.items()}
        axes.axhline(means["float-again"], color="0.6", linestyle="--")
        for kind in (kind for kind in means if not kind.startswith("float")):
            place = bits(kind, runs[kind][0]), means[kind]
            axes.plot(*place, "o", color="C0")
            axes.annotate(kind, place, textcoords="offset points", xytext=(6, -3))
        axes.margins(x=0.25)
        axes.set(xlabel="bits of a weight's value, scales counted", ylabel=label)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


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
