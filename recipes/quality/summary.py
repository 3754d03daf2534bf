"""Table and picture of the runs that run.sh made: BLEU and chrF on the test set, validation loss, loss curves."""

import argparse
import json
import re
from pathlib import Path
from statistics import mean

from lsq.commands import logs
from lsq.commands.losses import LOSSES, draw_losses, read_losses

BASELINES = {
    "float": "float",
    "int8-int8": "float",
    "int8-float": "float",
    "float-again": "float-again",
    "int8-int8-from-float": "float-again",
    "int8-float-from-float": "float-again",
}
"""Each kind of run and the one that it is compared with."""


def collect(output: Path) -> dict[str, list[dict]]:
    """Kind of run -> the results of its seeds."""
    found: dict[str, list[dict]] = {kind: [] for kind in BASELINES}
    for path in sorted(output.glob("*/results.json")):
        kind, _, seed = path.parent.name.rpartition("-")
        if kind in found and re.fullmatch(r"\d+", seed):
            found[kind].append(json.loads(path.read_text(encoding="utf-8")))
    return {kind: runs for kind, runs in found.items() if runs}


def table(runs: dict[str, list[dict]]) -> str:
    """Markdown: each kind with its figures for every seed, the means, and the difference to its baseline."""
    lines = ["| training | BLEU | mean | to float | chrF | validation loss | seconds |", "|---" * 7 + "|"]
    for kind, results in runs.items():
        bleu = mean(run["bleu"] for run in results)
        baseline = runs.get(BASELINES[kind])
        difference = f"{bleu - mean(run['bleu'] for run in baseline):+.2f}" if baseline else "–"
        columns = [
            kind, _join(results, "bleu", ".2f"), f"{bleu:.2f}", difference, _join(results, "chrf", ".2f"),
            _join(results, "best_validation_loss", ".3f"), _join(results, "training_seconds", ".0f"),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _join(results: list[dict], key: str, form: str) -> str:
    return " / ".join(format(run[key], form) for run in results)


def main() -> None:
    logs.configure()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the folder that run.sh wrote")
    output = parser.parse_args().output
    runs = collect(output)
    if not runs:
        parser.error(f"no results of recipes/quality/run.sh in {output}")
    print(table(runs))
    first = {kind: results[0]["run"] for kind, results in runs.items()}
    curves = {kind: read_losses(output / name / "model" / LOSSES) for kind, name in first.items()}
    draw_losses(curves, output / "quality.png", "Float and int8, the same data, seed and updates")


if __name__ == "__main__":
    main()
