"""Turns results of benchmarks, one JSON object a line, into Markdown or into a short table.

python benchmarks/results_table.py kernels.jsonl gemm.jsonl step.jsonl [--short] [--output
results.md]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import common

GOAL = 0.85
"""What the kernels of an operation should reach of a copy's bandwidth."""
LONGEST, MOST = 200, 10
"""Characters of a failure, and failures, in the short table."""
HEADLINE = (
    "device",
    "multiprocessors",
    "nvidia_smi",
    "cuda",
    "copy_gigabytes_per_second",
    "versions",
    "baseline",
)
HEADLINE += ("shapes", "shape", "dtypes")
"""Conditions that stand above a table, where there are any."""


def load(paths: Iterable[Path]) -> list[dict]:
    """Every result of the files.

    Raises:
        ValueError: a line is not the JSON object of a benchmark.
    """
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                result = json.loads(line)
                found.append(
                    {key: result[key] for key in ("benchmark", "conditions", "rows")} | result
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not the JSON object of a benchmark ({error!r})"
                ) from error
    return found


def markdown(result: Mapping) -> str:
    """Heading, conditions, table, and what failed or was left out."""
    conditions = result["conditions"]
    lines = [f"## {result['benchmark']}, {conditions['device']}", ""]
    lines += [
        f"* {key}: {common.plain(conditions[key])}" for key in HEADLINE if conditions.get(key)
    ]
    lines += ["", *markdown_table(result["rows"])]
    if "kernels" in result:
        lines += ["", *markdown_table(result["kernels"])]
    lines += [
        f"* failed: {what}: {why.splitlines()[0]}" for what, why in result.get("failed", {}).items()
    ]
    lines += [f"* left out, no time: {what}" for what in result.get("left_out", ())]
    return "\n".join(lines) + "\n"


def markdown_table(rows: list[Mapping]) -> list[str]:
    """Lines of a table; none without rows."""
    if not rows:
        return ["No rows."]
    body = [[common.cell(value).replace("|", "\\|") for value in row.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (list(rows[0]), ["---"] * len(rows[0]), *body)]


def operations(rows: list[Mapping]) -> list[dict]:
    """One row for each operation: its kernels' ratio to a copy, and the most gigabytes a second."""
    found = []
    for name in dict.fromkeys(row["operation"] for row in rows):
        mine = [row for row in rows if row["operation"] == name and row["ratio"] is not None]
        if mine:
            ratios = [row["ratio"] for row in mine]
            figures = {
                "worst": min(ratios),
                "median": statistics.median(ratios),
                "best": max(ratios),
            }
            reached = sum(ratio >= GOAL for ratio in ratios)
            fastest = max(row["gigabytes_per_second"] for row in mine)
            found.append(
                {
                    "operation": name,
                    "calls": len(mine),
                    f"at_{GOAL}": reached,
                    **figures,
                    "most": fastest,
                }
            )
    return found


def products(rows: list[Mapping]) -> list[dict]:
    """One row for each number of tokens: medians over the products, and the fastest."""
    keys = ("cublaslt_tops", "best_tops", "int_mm_tops", "bfloat16_tops", "ratio", "best_ratio")
    found = []
    for square, tokens in dict.fromkeys((row["layer"] == "square", row["tokens"]) for row in rows):
        mine = [
            row for row in rows if (row["layer"] == "square", row["tokens"]) == (square, tokens)
        ]
        medians = {key: statistics.median(row[key] for row in mine) for key in keys}
        where = f"{tokens}, square" if square else str(tokens)
        most = max(row["best_tops"] for row in mine)
        found.append({"tokens": where, "products": len(mine), **medians, "most_tops": most})
    return found


def steps(rows: list[Mapping]) -> list[dict]:
    """The figures that matter most of each side."""
    keys = (
        "side",
        "model",
        "tokens",
        "milliseconds",
        "tokens_per_second",
        "peak_gigabytes",
        "loss",
        "ratio",
    )
    return [{key: row[key] for key in keys} | {"remark": row["remark"][:40]} for row in rows]


def probes(rows: list[Mapping]) -> list[dict]:
    """How many kernels are right, and those that are not."""
    right = {
        "kernel": f"{sum(row['state'] == 'ok' for row in rows)} of {len(rows)}",
        "state": "ok",
        "why": "",
    }
    wrong = [row for row in rows if row["state"] != "ok"]
    return [right, *({key: str(row[key])[:LONGEST] for key in right} for row in wrong)]


SHORT: dict[str, Callable[[list[Mapping]], list[dict]]] = {
    "gemm": products,
    "gpu_step": steps,
    "probe": probes,
}
"""Benchmark -> what is told of its rows; of a benchmark of operations: `operations`."""


def short(results: list[Mapping]) -> str:
    """A few lines on everything."""
    rows: dict[str, list[dict]] = {}
    for result in results:
        name, found = result["benchmark"], result["rows"]
        kind = "operations" if found and "kernels_microseconds" in found[0] else name
        summary = operations if kind == "operations" else SHORT.get(name, list)
        rows.setdefault(kind, []).extend(summary(found))
    for result in results:  # of what was measured first
        kernels = result.get("kernels", [])
        first = [
            row
            for row in kernels
            if all(row[key] == kernels[0][key] for key in ("side", "model", "tokens"))
        ]
        rows.setdefault("kernels", []).extend(first)
    parts = [f"{kind}\n{common.table(found)}" for kind, found in rows.items() if found]
    failed = [
        f"{result['benchmark']} failed: {what}: {why}"[:LONGEST]
        for result in results
        for what, why in result.get("failed", {}).items()
    ]
    left_out = [
        f"{result['benchmark']}: {len(result['left_out'])} measurements left out, no time"
        for result in results
        if result.get("left_out")
    ]
    more = [f"and {len(failed) - MOST} failures more"] if len(failed) > MOST else []
    return "\n\n".join([*parts, "\n".join([*failed[:MOST], *more, *left_out])]).rstrip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE", help="lines of JSON")
    parser.add_argument(
        "--short", action="store_true", help="print a few lines on everything instead of Markdown"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the Markdown to FILE, print nothing of it",
    )
    options = parser.parse_args(arguments)
    results = load(options.results)
    text = "\n".join(map(markdown, results))
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    if options.short:
        print(short(results))
    elif not options.output:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
