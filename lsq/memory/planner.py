"""`plan` chooses the offsets of buffers so that the peak is low.

The problem is dynamic storage allocation, which is NP-hard. A few greedy orders reach the lower
bound on most programs; method "exact" searches where they do not. Every plan is checked.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from lsq.memory.buffers import (
    LARGEST,
    Buffer,
    Plan,
    busiest_loads,
    by_area,
    by_load,
    by_size,
    by_start,
    check,
    check_buffers,
    fixed_offsets,
    lower_bound,
    peak_of,
    place,
)

TIME_LIMIT = 30.0
"""Default seconds of "exact"."""
ORDERS = {
    "greedy_by_load": (by_load,),
    "greedy_by_size": (by_size,),
    "training": (by_load, by_area),
    "portfolio": (by_load, by_area, by_start, by_size),
}
"""Greedy method -> the orders that it tries. The lowest peak wins, at a tie the earlier order."""
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
        buffers: with different names.
        method: "greedy_by_size" (Pisarchyk and Lee 2020), "greedy_by_load", "training" (the better
            of two orders, for steps and passes), "portfolio" (the best of four) or "exact" (a
            search after Moffitt 2023, MiniMalloc, that starts from the portfolio).
        capacity: bytes that are enough; the search stops there. None: "exact" looks for the
            smallest peak. `capacity_met` compares the peak with it, or for "exact" with the lower
            bound.
        time_limit: seconds for the search of "exact". KeyboardInterrupt ends it, too.
        progress: called by "exact" several times a second with the number of positions tried.

    Raises:
        ValueError: an argument or a buffer is wrong.
        LibraryError: "exact" needs the C++ host library, which is not built.
    """
    start = time.perf_counter()
    buffers = list(buffers)
    _check_options(method, capacity, time_limit)
    check_buffers(buffers)
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


def _best_order(buffers: Sequence[Buffer], orders: Sequence[Callable], target: int) -> list[int]:
    """Return the offsets by the best of several orders; stop at a peak of `target` bytes."""
    best = None
    for order in orders:
        offsets = place(buffers, order(buffers), fixed_offsets(buffers))
        if best is None or peak_of(buffers, offsets) < peak_of(buffers, best):
            best = offsets
        if peak_of(buffers, best) <= target:
            break
    return best


def _check_options(method: str, capacity: int | None, time_limit: float) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(map(repr, METHODS))}")
    if capacity is not None and not (isinstance(capacity, int) and 0 < capacity <= LARGEST):
        raise ValueError(
            f"capacity is {capacity!r}; it must be a whole number of bytes from 1 to 2^62"
        )
    if not time_limit > 0:
        raise ValueError(f"time_limit is {time_limit!r}; it must be a number of seconds above 0")
