"""The orders in which buffers are placed, one after the other.

Pisarchyk and Lee 2020 (Efficient Memory Management for Deep Neural Net Inference) place by size.
"""

from collections.abc import Sequence

from lsq.memory.planner import by_area, by_load
from lsq.planner.buffer import Buffer


def by_size(buffers: Sequence[Buffer]) -> list[int]:
    """Largest first; then as given."""
    return sorted(range(len(buffers)), key=lambda i: -buffers[i].size)


def by_start(buffers: Sequence[Buffer]) -> list[int]:
    """Earliest first; then the largest, as given."""
    return sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -buffers[i].size))


ORDERS = {
    "greedy_by_load": (by_load,),
    "greedy_by_size": (by_size,),
    "portfolio": (by_load, by_area, by_start, by_size),
}
"""Greedy method -> the orders that it tries; the best plan wins, at a tie the earlier."""
