"""`plan`: offsets for the buffers of a training step, so that those alive at one time do not
overlap.

Best fit by the live load, which all but reaches the lower bound on trainings, or, where gradients
outweigh activations, by area. lsq.planner can do more.
"""

import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy

from lsq.memory.buffer import Buffer, Plan, live_load
from lsq.memory.placement import place


def plan(buffers: Sequence[Buffer]) -> Plan:
    """Place buffers whose names differ, and prove that none overlap.

    The result depends on the buffers alone.
    """
    start = time.perf_counter()
    occupying = [buffer for buffer in buffers if buffer.size]
    bound = max((load for _, load in live_load(occupying)), default=0)
    placement = place(occupying, by_load(occupying))
    if placement.used[0] > bound:
        placement = min(
            placement, place(occupying, by_area(occupying)), key=lambda made: made.used[0]
        )
    for moment, one, other in overlaps(occupying, placement.offsets):
        raise RuntimeError(
            f"the plan is wrong: {one.name} and {other.name} overlap at operation {moment}"
        )
    offsets = dict.fromkeys((buffer.name for buffer in buffers), 0)
    offsets |= {
        buffer.name: offset for buffer, offset in zip(occupying, placement.offsets, strict=True)
    }
    return Plan(
        offsets=offsets,
        peak=placement.used[0],
        lower_bound=bound,
        seconds=time.perf_counter() - start,
    )


def by_load(lives: Sequence) -> list[int]:
    """The order in which to place buffers: largest live load during the life; then the largest, the
    earliest, as given.

    Programs of training are packed best so: what crosses the peak must be packed tightly.
    """
    loads = busiest_loads(lives)
    return sorted(range(len(lives)), key=lambda i: (-loads[i], -lives[i].size, lives[i].first))


def by_area(lives: Sequence) -> list[int]:
    """The order: largest size times length of life first; then as given."""
    return sorted(
        range(len(lives)), key=lambda i: -lives[i].size * (lives[i].last - lives[i].first + 1)
    )


def busiest_loads(lives: Sequence) -> list[int]:
    """The largest live load during each life, in bytes.

    Range maxima by doubling: row k of a sparse table holds the maxima over 2^k times; it is made
    from the row before and dropped after use, so that memory stays linear.
    """
    if not lives:
        return []
    times, loads = (
        numpy.array(column, dtype=numpy.int64) for column in zip(*live_load(lives), strict=True)
    )
    first = numpy.searchsorted(times, [one.first for one in lives])
    last = numpy.searchsorted(times, [one.last + 1 for one in lives]) - 1
    exponents = numpy.array([int(length).bit_length() - 1 for length in last - first + 1])
    found = numpy.zeros(len(lives), dtype=numpy.int64)
    for exponent in range(exponents.max() + 1):
        asked = exponents == exponent
        found[asked] = numpy.maximum(loads[first[asked]], loads[last[asked] + 1 - 2**exponent])
        loads = numpy.maximum(loads[: -(2**exponent)], loads[2**exponent :])
    return found.tolist()


def overlaps(lives: Sequence, offsets: Sequence[int]) -> Iterator[tuple[int, object, object]]:
    """Yield (time, one, other) where two of `lives` share bytes at one time; it has nothing in
    common with placing.

    A sweep over time keeps those that are alive in order of their offsets and compares neighbours.
    At least one pair is found wherever there are any, not every pair.
    """
    events = [(one.first, 1, number) for number, one in enumerate(lives) if one.size]
    events += [(one.last + 1, 0, number) for number, one in enumerate(lives) if one.size]
    alive: list[tuple[int, int]] = []
    for moment, starts, number in sorted(events):
        entry = (offsets[number], number)
        if not starts:
            alive.pop(bisect_left(alive, entry))
            continue
        at = bisect_left(alive, entry)
        insort(alive, entry)
        for (start, below), (end, above) in itertools.pairwise(alive[max(0, at - 1) : at + 2]):
            if start + lives[below].size > end:
                yield moment, lives[below], lives[above]
