"""`plan`: offsets for buffers, so that those alive at one time do not overlap and the peak is low.

The problem is dynamic storage allocation, which is NP-hard. A few greedy orders reach the lower
bound on most programs; the method "exact" searches where they do not. Every plan is checked by
lsq.memory.validator before it is returned.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy

from lsq.memory.buffer import LARGEST, Buffer, Plan, fixed_offsets, live_load, lower_bound
from lsq.memory.placement import Placement, capacity_of, place
from lsq.memory.validator import check, overlaps

TIME_LIMIT = 30.0
"""Default seconds of "exact"."""
GRANULARITY = 2 * 2**20
"""Bytes; capacities of segments under a cap are multiples, as CUDA's virtual memory has them."""


def by_load(buffers: Sequence[Buffer]) -> list[int]:
    """Largest live load during the life first; then the largest, the earliest, as given.

    This packs training programs best: buffers that cross the peak must be packed tightly.
    """
    loads = busiest_loads(buffers)
    keys = [(-load, -each.size, each.first) for load, each in zip(loads, buffers, strict=True)]
    return sorted(range(len(buffers)), key=keys.__getitem__)


def by_area(buffers: Sequence[Buffer]) -> list[int]:
    """Largest size times length of life first; then as given."""
    return sorted(
        range(len(buffers)),
        key=lambda i: -buffers[i].size * (buffers[i].last - buffers[i].first + 1),
    )


def by_size(buffers: Sequence[Buffer]) -> list[int]:
    """Largest first, as Pisarchyk and Lee 2020 do; then as given."""
    return sorted(range(len(buffers)), key=lambda i: -buffers[i].size)


def by_start(buffers: Sequence[Buffer]) -> list[int]:
    """Earliest first; then the largest, as given."""
    return sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -buffers[i].size))


ORDERS = {
    "greedy_by_load": (by_load,),
    "greedy_by_size": (by_size,),
    "training": (by_load, by_area),
    "portfolio": (by_load, by_area, by_start, by_size),
}
"""Greedy method -> the orders that it tries; the best plan wins, at a tie the earlier."""
METHODS = (*ORDERS, "exact")


def plan(
    buffers: Iterable[Buffer],
    *,
    method: str = "portfolio",
    capacity: int | None = None,
    time_limit: float = TIME_LIMIT,
    cap: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Place buffers. The result depends on the arguments alone, unless "exact" runs out of time.

    Args:
        buffers: their names differ.
        method: "greedy_by_size" (Pisarchyk and Lee 2020), "greedy_by_load", "training" (the better
            of two orders, for steps and passes), "portfolio" (the best of four) or "exact" (a
            search after Moffitt 2023, MiniMalloc, that starts from the portfolio).
        capacity: bytes to keep to; "exact" stops there. Without it, "exact" looks for the smallest
            peak. `capacity_met` says whether the capacity (for "exact" without one, the lower
            bound) was met.
        time_limit: seconds for the search of "exact". KeyboardInterrupt ends the search, too.
        cap: largest segment in bytes; memory is split into as many segments as that takes, each
            rounded up to a multiple of 2 MiB (or to the cap).
        progress: called by "exact" several times a second with the number of positions tried.

    Raises:
        ValueError: an argument or a buffer is wrong, or the segments are too small.
        LibraryError: "exact" needs the C++ host library, which is not built.
    """
    start = time.perf_counter()
    buffers = list(buffers)
    _check_options(method, capacity, time_limit, cap)
    _check_buffers(buffers, cap)
    orders = ORDERS.get(method, ORDERS["portfolio"])
    occupying = [buffer for buffer in buffers if buffer.size]
    bound = lower_bound(occupying)
    target = bound if capacity is None else capacity
    if cap is not None:
        placement, capacities = _fill_segments(occupying, orders, cap)
    else:
        placement = _best_order(occupying, orders, target)
        if method == "exact":
            left = start + time_limit - time.perf_counter()
            loads = busiest_loads(occupying)
            from lsq.memory import exact  # for `lsq plan` alone

            placement = exact.improve(occupying, loads, placement, target, left, progress)
        capacities = placement.used
    names = [buffer.name for buffer in occupying]
    result = Plan(
        offsets={buffer.name: buffer.offset or 0 for buffer in buffers}
        | dict(zip(names, placement.offsets, strict=True)),
        segments=dict.fromkeys((buffer.name for buffer in buffers), 0)
        | dict(zip(names, placement.segments, strict=True)),
        used=tuple(placement.used),
        capacities=tuple(capacities),
        lower_bound=bound,
        method=method,
        seconds=time.perf_counter() - start,
        capacity_met=placement.used[0] <= target
        if capacity is not None or method == "exact"
        else None,
    )
    check(buffers, result)
    return result


def busiest_loads(buffers: Sequence[Buffer]) -> list[int]:
    """The largest live load during each life, in bytes.

    Range maxima by doubling: row k of a sparse table holds the maxima over 2^k times; it is made
    from the row before and dropped after use, so that memory stays linear.
    """
    if not buffers:
        return []
    times, loads = (
        numpy.array(column, dtype=numpy.int64) for column in zip(*live_load(buffers), strict=True)
    )
    first = numpy.searchsorted(times, [buffer.first for buffer in buffers])
    last = numpy.searchsorted(times, [buffer.last + 1 for buffer in buffers]) - 1
    exponents = numpy.array([int(length).bit_length() - 1 for length in last - first + 1])
    busiest = numpy.zeros(len(buffers), dtype=numpy.int64)
    for exponent in range(exponents.max() + 1):
        asked = exponents == exponent
        busiest[asked] = numpy.maximum(loads[first[asked]], loads[last[asked] + 1 - 2**exponent])
        loads = numpy.maximum(loads[: -(2**exponent)], loads[2**exponent :])
    return busiest.tolist()


def _best_order(buffers: Sequence[Buffer], orders: Sequence[Callable], target: int) -> Placement:
    """One segment by the best of several orders; stop where `target` bytes are enough."""
    best = None
    for order in orders:
        placement = place(buffers, order(buffers), fixed=fixed_offsets(buffers))
        if best is None or placement.used[0] < best.used[0]:
            best = placement
        if best.used[0] <= target:
            break
    return best


def _fill_segments(
    buffers: Sequence[Buffer], orders: Sequence[Callable], cap: int
) -> tuple[Placement, list[int]]:
    """Segments of at most `cap` bytes, and the bytes to allocate for each.

    The order wins that has the smallest (sum of capacities, number of segments, largest segment).
    """
    for buffer in buffers:
        if buffer.size > cap:
            raise ValueError(
                f"buffer {buffer.name!r} has {buffer.size} bytes, but the largest segment may have"
                f" {cap}"
            )
    results = []
    for order in orders:
        placement = place(buffers, order(buffers), [cap] * max(1, len(buffers)), GRANULARITY)
        count = max(1, sum(used > 0 for used in placement.used))  # empty segments are the last
        capacities = [capacity_of(used, cap, GRANULARITY) for used in placement.used[:count]]
        results.append((replace(placement, used=placement.used[:count]), capacities))
    return min(results, key=lambda result: (sum(result[1]), len(result[1]), max(result[1])))


def _check_options(method: str, capacity: int | None, time_limit: float, cap: int | None) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(map(repr, METHODS))}")
    for name, size in (("capacity", capacity), ("cap", cap)):
        if size is not None and not (isinstance(size, int) and 0 < size <= LARGEST):
            raise ValueError(
                f"{name} is {size!r}; it must be a whole number of bytes from 1 to 2^62"
            )
    if cap is not None and method == "exact":
        raise ValueError(
            'method is "exact", which plans one segment; leave out cap, or use "portfolio"'
        )
    if cap is not None and capacity is not None:
        raise ValueError("capacity bounds one segment; with cap, leave it out")
    if not time_limit > 0:
        raise ValueError(f"time_limit is {time_limit!r}; it must be a number of seconds above 0")


def _check_buffers(buffers: Sequence[Buffer], cap: int | None) -> None:
    if sum(buffer.size + buffer.alignment + (buffer.offset or 0) for buffer in buffers) > LARGEST:
        raise ValueError(
            "sizes, alignments and offsets of all buffers add up to more than 2^62 bytes"
        )
    names: set[str] = set()
    for buffer in buffers:
        if buffer.name in names:
            raise ValueError(f"two buffers are called {buffer.name!r}; names must differ")
        names.add(buffer.name)
    fixed = [buffer for buffer in buffers if buffer.offset is not None]
    if fixed and cap is not None:
        raise ValueError(
            f"buffer {fixed[0].name!r} has an offset, {fixed[0].offset}, and cap makes several"
            " segments, of which an offset names none; leave out one of the two"
        )
    for moment, a, b in overlaps(fixed, [buffer.offset for buffer in fixed]):
        raise ValueError(
            f"buffers {a.name!r} and {b.name!r} overlap at operation {moment} at the offsets"
            f" that are given, {a.offset} and {b.offset}; change one, or leave it out"
        )
