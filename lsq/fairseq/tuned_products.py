"""The report of tuned products at the end of a training on a GPU."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from lsq import files
from lsq.gemm import lookup
from lsq.gemm.lookup import Table, Use
from lsq.gemm.tuner import product_list

logger = logging.getLogger(__name__)

SHOWN = 10
"""Missed products that the log lists."""


def check(path: str | None) -> None:
    """Refuse, before a training, a file that `report` could not write after it.

    Raises:
        ValueError: it is a folder, or its own folder is missing or cannot be written.
    """
    if path and (os.path.isdir(path) or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise ValueError(
            f"--lsq-gemm-coverage {path} cannot be written; name a file in a folder that is there"
        )


def report(path: str | None) -> None:
    """Log how many products of a GPU were tuned, and list the others in `path` for `lsq tune
    --shapes`. Products of CPUs are not tuned, so none of them is listed."""
    table = lookup.loaded()
    if table is not None and table.uses():
        logger.info(coverage(table))
    if path:
        missed = [] if table is None else [use.key for use in _missed(table)]
        files.write_text(Path(path), product_list.text(missed))


def coverage(table: Table) -> str:
    """The shares of tuned products and the largest missed ones; one line without a file."""
    name, uses = f"tuned products on {table.here.device}", table.uses()
    if not table.used:
        return f"{name}: none, for there is no file for this device; lsq tune makes one"
    lines = [f"{name}: {len(uses)} products"]
    measures: dict[str, Callable[[Use], int]] = {
        "products": lambda use: 1,
        "arithmetic": lambda use: use.key.arithmetic,
    }
    for measure, size in measures.items():
        total = sum(map(size, uses))
        own = sum(size(use) for use in uses if use.hit) / total
        near = sum(size(use) for use in uses if use.entry is not None) / total - own
        lines.append(
            f"  {measure}: {own:.1%} tuned, {near:.1%} as the nearest batch size,"
            f" {1 - own - near:.1%} not"
        )
    lines += [f"  from {each.path}" for each in table.used]
    missed = _missed(table)
    for use in missed[:SHOWN]:
        served = f"ran as {use.entry.key.tokens} tokens" if use.entry else "ran untuned"
        lines.append(f"  missed {use.key}: {served}")
    if len(missed) > SHOWN:
        lines.append(f"  and {len(missed) - SHOWN} more")
    return "\n".join(lines)


def _missed(table: Table) -> list[Use]:
    """The products without an entry of their own, the largest first."""
    missed = [use for use in table.uses() if not use.hit]
    return sorted(missed, key=lambda use: (-use.key.arithmetic, str(use.key)))
