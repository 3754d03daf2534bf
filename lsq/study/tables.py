"""Tables as text that fits the terminal."""

import shutil
from collections.abc import Sequence

from lsq import extras

UNLIMITED = 10**6
STEPS = ((None, None), (None, 10), (20, 10), (12, 10))
"""(text, titles): largest widths of cells; the first pair that fits counts. Numbers never wrap."""


def fitted(
    rows: Sequence[Sequence[str]],
    head: Sequence[str],
    sides: Sequence[str],
    *,
    style: str = "simple",
    keys: int = 1,
    width: int | None = None,
) -> str:
    """Format a table as wide as `width` or the terminal: text wraps, last columns go on below."""
    extras.require("a table", "study")
    from tabulate import tabulate

    width = width or shutil.get_terminal_size((UNLIMITED, 0)).columns
    for text, title in STEPS:
        table = tabulate(
            rows,
            head,
            tablefmt=style,
            disable_numparse=True,
            colalign=sides,
            maxheadercolwidths=title,
            maxcolwidths=[text if side == "left" else None for side in sides],
        )
        if max(map(len, table.splitlines())) <= width:
            return table
    if len(head) <= keys + 1:
        return table
    middle = (len(head) + keys + 1) // 2
    parts = []
    for columns in ([*range(middle)], [*range(keys), *range(middle, len(head))]):
        *some, titles, aligned = [[line[i] for i in columns] for line in (*rows, head, sides)]
        parts.append(fitted(some, titles, aligned, style=style, keys=keys, width=width))
    return "\n\n".join(parts)
