"""The orders in which buffers are placed, one after the other.

Pisarchyk and Lee 2020 (Efficient Memory Management for Deep Neural Net Inference) place by size. Programs of training
are packed better by the load at the busiest moment of a life: what crosses the peak must be packed tightly.
"""

from collections.abc import Sequence

import numpy

from lsq.memory.buffer import Block, live_load


def busiest_loads(blocks: Sequence[Block]) -> list[int]:
    """The largest live load during each block's life, in bytes.

    Range maxima by doubling: row k of a sparse table holds the maxima over 2^k times; it is made from the row before
    and dropped after use, so that memory stays linear.
    """
    if not blocks:
        return []
    times, loads = (numpy.array(column, dtype=numpy.int64) for column in zip(*live_load(blocks), strict=True))
    first = numpy.searchsorted(times, [block.first for block in blocks])
    last = numpy.searchsorted(times, [block.last + 1 for block in blocks]) - 1
    exponents = numpy.array([int(length).bit_length() - 1 for length in last - first + 1])
    found = numpy.zeros(len(blocks), dtype=numpy.int64)
    for exponent in range(exponents.max() + 1):
        asked = exponents == exponent
        found[asked] = numpy.maximum(loads[first[asked]], loads[last[asked] + 1 - 2**exponent])
        loads = numpy.maximum(loads[: -(2**exponent)], loads[2**exponent :])
    return found.tolist()


def by_size(blocks: Sequence[Block]) -> list[int]:
    """Largest first; then as given."""
    return sorted(range(len(blocks)), key=lambda i: -blocks[i].size)


def by_load(blocks: Sequence[Block]) -> list[int]:
    """Largest live load during the life first; then the largest, the earliest, as given."""
    loads = busiest_loads(blocks)
    return sorted(range(len(blocks)), key=lambda i: (-loads[i], -blocks[i].size, blocks[i].first))


def by_area(blocks: Sequence[Block]) -> list[int]:
    """Largest size times length of life first; then as given."""
    return sorted(range(len(blocks)), key=lambda i: -blocks[i].size * (blocks[i].last - blocks[i].first + 1))


def by_start(blocks: Sequence[Block]) -> list[int]:
    """Earliest first; then the largest, as given."""
    return sorted(range(len(blocks)), key=lambda i: (blocks[i].first, -blocks[i].size))


ORDERS = {
    "greedy_by_load": (by_load,),
    "greedy_by_size": (by_size,),
    "portfolio": (by_load, by_area, by_start, by_size),
}
"""Greedy method -> the orders that it tries; the best plan wins, at a tie the earlier."""
