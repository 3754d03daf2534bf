"""What formats cost in loss, for people: a table, and how well the estimate tells what was
measured."""

import math
from collections.abc import Callable

import torch

from lsq.study.costs import KINDS, Cost, Costs
from lsq.study.table import PLURALS
from lsq.study.tables import UNLIMITED, fitted

ESTIMATES: dict[str, Callable[[Cost], float]] = {
    "second term": lambda cost: cost.second,
    "both terms": lambda cost: cost.first + cost.second,
}
"""What stands against the cost that was measured."""


def correlation(costs: Costs, kind: str, estimate: str) -> float:
    """Rank correlation (Spearman 1904) of one of ESTIMATES with the measured cost, over all tensors
    of a kind in all formats; NaN where fewer than 2 were measured or all are alike.
    """
    found = [
        cost
        for tensor in costs.of(kind)
        for cost in tensor.formats.values()
        if cost.cost is not None
    ]
    if len(found) < 2:
        return math.nan
    measured = torch.tensor([cost.cost for cost in found], dtype=torch.float64)
    estimated = torch.tensor([ESTIMATES[estimate](cost) for cost in found], dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([_ranks(measured), _ranks(estimated)]))[0, 1])


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Places in order, float64 [N]; of equal values the mean of theirs."""
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[place]


def table(costs: Costs, style: str = "simple") -> str:
    """Costs of all tensors in all formats, their sums, and correlations with the estimate.

    Args:
        style: of tabulate ("github" is Markdown, for files).
    """
    parts = [
        f"Loss {costs.loss:.4f}, a mean over {costs.count:g}; estimates from {costs.samples}"
        " gradients."
    ]
    for kind in KINDS:
        tensors = costs.of(kind)
        if not tensors:
            continue
        rows = [
            [tensor.name, *(_figure(tensor.formats[form].cost) for form in costs.formats)]
            for tensor in tensors
        ]
        sums = [[tensor.formats[form].cost for tensor in tensors] for form in costs.formats]
        rows.append(["sum", *(_figure(None if None in column else sum(column)) for column in sums)])
        values = sum(tensor.values for tensor in tensors)
        bits = [
            sum(one.formats[form].bits * one.values for one in tensors) / values
            for form in costs.formats
        ]
        rows.append(["bits of a value", *(f"{width:.2f}" for width in bits)])
        sides = ("left", *("right",) * len(costs.formats))
        head = [f"cost of {PLURALS[kind]}", *costs.formats]
        parts.append(
            fitted(rows, head, sides, style=style, width=UNLIMITED if style == "github" else None)
        )
        found = [f"{correlation(costs, kind, name):.3f} for {name}" for name in ESTIMATES]
        parts.append(f"Rank correlation of costs with their estimate: {', '.join(found)}.")
    return "\n\n".join(parts)


def _figure(cost: float | None) -> str:
    return "not finite" if cost is None else f"{cost:+.5f}"
