"""Which products a run asked for, and which of them were tuned: for the log, and as a list for `lsq
tune --shapes`."""

from collections.abc import Callable

from lsq.gemm.lookup import Table, Use
from lsq.gemm.product_key import ProductKey

SHOWN = 10
"""Missed products that the text lists."""
MEASURES: dict[str, Callable[[Use], float]] = {
    "calls": lambda use: use.calls,
    "arithmetic": lambda use: use.calls * use.key.arithmetic,
    "time": lambda use: use.seconds,
}


def missed(table: Table) -> list[ProductKey]:
    """The products without an entry of their own, those that take longest first."""
    return [use.key for use in _ordered(table) if not use.hit]


def shares(table: Table, measure: str) -> tuple[float, float] | None:
    """(share with an entry of their own, share that ran by the nearest batch size's); None if there
    were none.

    Args:
        measure: one of MEASURES.
    """
    uses = [(use, MEASURES[measure](use)) for use in table.uses()]
    total = sum(size for _, size in uses)
    if not total:
        return None
    own = sum(size for use, size in uses if use.hit)
    served = sum(size for use, size in uses if use.entry is not None)
    return own / total, (served - own) / total


def text(table: Table) -> str:
    """For logs: the shares, and the missed products that matter most; one line where there is no
    file."""
    uses = _ordered(table)
    calls = sum(use.calls for use in uses)
    if not calls:
        return f"tuned products on {table.here.device}: none was asked for"
    if not table.used:
        return (
            f"tuned products on {table.here.device}: none, for there is no file for this"
            " device;"
            " lsq tune makes one"
        )
    lines = [f"tuned products on {table.here.device}: {calls} calls of {len(uses)} products"]
    for measure in MEASURES:
        found = shares(table, measure)
        if found is not None:
            own, near = found
            lines.append(
                f"  {measure}: {own:.1%} tuned, {near:.1%} as the nearest batch size,"
                f" {1 - own - near:.1%} not"
            )
    lines += [f"  from {each.path}" for each in table.used]
    rest = [use for use in uses if not use.hit]
    for use in rest[:SHOWN]:
        time = f", {use.seconds:.3f} s" if use.seconds else ""
        served = f"ran as {use.entry.key.tokens} tokens" if use.entry else "ran untuned"
        lines.append(f"  missed {use.key}: {use.calls} calls{time}; {served}")
    if len(rest) > SHOWN:
        lines.append(f"  and {len(rest) - SHOWN} more")
    return "\n".join(lines)


def _ordered(table: Table) -> list[Use]:
    """By time where it was measured, else by arithmetic."""
    return sorted(
        table.uses(), key=lambda use: (-use.seconds, -MEASURES["arithmetic"](use), str(use.key))
    )
