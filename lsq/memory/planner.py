"""`plan`: offsets for buffers, so that those alive at one time do not overlap and the peak is low.

The problem is dynamic storage allocation, which is NP-hard. A few greedy orders reach the lower
bound on most programs; the method "exact" searches where they do not.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy
import torch

from lsq.memory.buffer import LARGEST, Buffer, Plan, check, live_load, lower_bound, overlaps
from lsq.native import loader

TIME_LIMIT = 30.0
"""Default seconds of "exact"."""
NO_OFFSET = -1
"""Stands for None in C++."""


def by_load(buffers: Sequence[Buffer]) -> list[int]:
    """Largest live load during the life first; then the largest, the earliest, as given.

    This packs training programs best: buffers that cross the peak must be packed tightly.
    """
    loads = busiest_loads(buffers)
    return sorted(
        range(len(buffers)), key=lambda i: (-loads[i], -buffers[i].size, buffers[i].first)
    )


def by_area(buffers: Sequence[Buffer]) -> list[int]:
    """Largest size times length of life first; then as given."""
    return sorted(range(len(buffers)), key=lambda i: -buffers[i].size * buffers[i].operations)


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
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Choose the offsets of buffers. The result depends on the arguments alone, unless "exact" runs
    out of time.

    Args:
        buffers: their names differ.
        method: "greedy_by_size" (Pisarchyk and Lee 2020), "greedy_by_load", "training" (the better
            of two orders, for steps and passes), "portfolio" (the best of four) or "exact" (a
            search after Moffitt 2023, MiniMalloc, that starts from the portfolio).
        capacity: bytes to keep to; "exact" stops there. Without it, "exact" looks for the smallest
            peak. `capacity_met` says whether the capacity (for "exact" without one, the lower
            bound) was met.
        time_limit: seconds for the search of "exact". KeyboardInterrupt ends the search, too.
        progress: called by "exact" several times a second with the number of positions tried.

    Raises:
        ValueError: an argument or a buffer is wrong.
        LibraryError: "exact" needs the C++ host library, which is not built.
    """
    start = time.perf_counter()
    buffers = list(buffers)
    _check_options(method, capacity, time_limit)
    _check_buffers(buffers)
    occupying = [buffer for buffer in buffers if buffer.size]
    bound = lower_bound(occupying)
    target = bound if capacity is None else capacity
    offsets = _best_order(occupying, ORDERS.get(method, ORDERS["portfolio"]), target)
    if method == "exact":
        from lsq.memory import exact  # for `lsq plan` alone

        left = start + time_limit - time.perf_counter()
        loads = busiest_loads(occupying)
        offsets = exact.improve(occupying, loads, offsets, target, left, progress)
    peak = peak_of(occupying, offsets)
    chosen = zip((buffer.name for buffer in occupying), offsets, strict=True)
    result = Plan(
        offsets={buffer.name: buffer.offset or 0 for buffer in buffers} | dict(chosen),
        peak=peak,
        lower_bound=bound,
        method=method,
        seconds=time.perf_counter() - start,
        capacity_met=peak <= target if capacity is not None or method == "exact" else None,
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


def _best_order(buffers: Sequence[Buffer], orders: Sequence[Callable], target: int) -> list[int]:
    """Offsets by the best of several orders; stop where `target` bytes are enough."""
    best = None
    for order in orders:
        offsets = place(buffers, order(buffers), fixed_offsets(buffers))
        if best is None or peak_of(buffers, offsets) < peak_of(buffers, best):
            best = offsets
        if peak_of(buffers, best) <= target:
            break
    return best


def peak_of(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    """Bytes up to the end of the highest buffer."""
    ends = (offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True))
    return max(ends, default=0)


def fixed_offsets(buffers: Sequence[Buffer]) -> dict[int, int]:
    """Index -> offset of the buffers that no plan may move."""
    return {i: buffer.offset for i, buffer in enumerate(buffers) if buffer.offset is not None}


def place(buffers: Sequence[Buffer], order: Sequence[int], fixed: Mapping[int, int]) -> list[int]:
    """Offsets by best fit, algorithm 3 of Pisarchyk and Lee 2020 (Efficient Memory Management for
    Deep Neural Net Inference): one buffer after the other goes into the smallest gap between those
    that are alive at the same time, else above them all.

    Args:
        buffers: none of size 0.
        order: indices into `buffers`.
        fixed: index -> offset; those buffers go first.
    """
    order = [*(i for i in order if i in fixed), *(i for i in order if i not in fixed)]
    if not loader.available():
        return reference(buffers, order, fixed)
    numbers = {"dtype": torch.int64, "device": "cpu"}  # whatever torch.set_default_device says
    indices, limit = torch.tensor(order, **numbers), torch.tensor([LARGEST], **numbers)
    offsets, segments = torch.zeros(2, len(buffers), **numbers)
    rows, used = table(buffers, fixed), torch.zeros(1, **numbers)
    # lsq/csrc/cpu/planner.cpp can fill several segments: here one, rounded to 1 byte
    loader.call("lsq_place", rows, indices, len(order), limit, 1, 1, offsets, segments, used)
    return offsets.tolist()


def reference(
    buffers: Sequence[Buffer], order: Sequence[int], fixed: Mapping[int, int]
) -> list[int]:
    """`place` in plain Python; `order` begins with the buffers that have fixed offsets."""
    offsets = [0] * len(buffers)
    placed: list[tuple[int, int]] = []  # (offset, index), in order of offset
    for i in order:
        buffer, gaps, start = buffers[i], [], 0
        for offset, j in placed:
            if buffers[j].first <= buffer.last and buffer.first <= buffers[j].last:
                if start + buffer.size <= offset:
                    gaps.append((offset - start, start))
                end = -(-(offset + buffers[j].size) // buffer.alignment) * buffer.alignment
                start = max(start, end)
        offsets[i] = fixed[i] if i in fixed else min(gaps)[1] if gaps else start
        insort(placed, (offsets[i], i))
    return offsets


def table(buffers: Sequence[Buffer], fixed: Mapping[int, int]) -> torch.Tensor:
    """int64 [n, 5], which C++ reads as struct Buffer of lsq/csrc/cpu/planner.h."""
    rows = [
        (each.size, each.first, each.last, each.alignment, fixed.get(i, NO_OFFSET))
        for i, each in enumerate(buffers)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)


def _check_options(method: str, capacity: int | None, time_limit: float) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(map(repr, METHODS))}")
    if capacity is not None and not (isinstance(capacity, int) and 0 < capacity <= LARGEST):
        raise ValueError(
            f"capacity is {capacity!r}; it must be a whole number of bytes from 1 to 2^62"
        )
    if not time_limit > 0:
        raise ValueError(f"time_limit is {time_limit!r}; it must be a number of seconds above 0")


def _check_buffers(buffers: Sequence[Buffer]) -> None:
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
    for moment, a, b in overlaps(fixed, [buffer.offset for buffer in fixed]):
        raise ValueError(
            f"buffers {a.name!r} and {b.name!r} overlap at operation {moment} at the offsets"
            f" that are given, {a.offset} and {b.offset}; change one, or leave it out"
        )
