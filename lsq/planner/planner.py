"""`plan`: offsets for buffers, so that those alive at one time do not overlap and the peak is as
low as possible.

The problem is dynamic storage allocation, which is NP-hard. A few greedy orders reach the lower
bound on most programs; `exact` searches where they do not. Every plan is checked by
lsq.planner.validator before it is returned.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from lsq.memory.buffer import LARGEST
from lsq.memory.placement import Placement, place
from lsq.memory.planner import overlaps
from lsq.planner import exact, segments
from lsq.planner.buffer import Buffer, Plan, bound_of_pool, given_offsets
from lsq.planner.orders import ORDERS
from lsq.planner.validator import check

METHODS = (*ORDERS, "exact")
TIME_LIMIT = 30.0
"""Seconds that `exact` may take unless told otherwise."""


def plan(
    buffers: Iterable[Buffer],
    *,
    method: str = "portfolio",
    capacity: int | None = None,
    time_limit: float = TIME_LIMIT,
    cap: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Place buffers. The result depends on the arguments alone, unless `exact` runs out of time.

    Args:
        buffers: what to place.
        method: "greedy_by_size" (Pisarchyk and Lee 2020), "greedy_by_load" (by the largest live
            load during a life), "portfolio" (the best of four orders) or "exact" (a search after
            Moffitt 2023, MiniMalloc; it starts from the portfolio, and gives that back where it
            finds nothing better).
        capacity: bytes that each pool should keep to; `exact` tries to and is content with it.
            Without it, `exact` looks for the smallest peak. The plan says whether the capacity (for
            `exact` without one, the lower bound) was met.
        time_limit: seconds for the search of `exact`. KeyboardInterrupt ends the search, too.
        cap: largest segment in bytes; memory is split into as many segments as that takes, each
            rounded up to a multiple of 2 MiB (or to the cap).
        progress: called by `exact` several times a second with the number of positions tried so
            far.

    Raises:
        ValueError: an argument or a buffer is wrong, or the segments are too small.
        LibraryError: `exact` needs the C++ host library, which is not built.
    """
    start = time.perf_counter()
    buffers = list(buffers)
    _check_options(method, capacity, time_limit, cap)
    pools = _by_pool(buffers)
    _check_given(pools, cap)
    orders = ORDERS.get(method, ORDERS["portfolio"])
    offsets = {buffer.name: buffer.offset or 0 for buffer in buffers}
    homes: dict[str, int] = {}
    rows: list[tuple[int, int, str]] = []  # of each segment: bytes used, capacity, pool
    met = True
    for pool, members in pools.items():
        planned = [buffer for buffer in members if buffer.size]
        homes |= dict.fromkeys((buffer.name for buffer in members), len(rows))
        if cap is not None:
            placement, capacities = segments.fill(planned, orders, cap)
        else:
            bound = bound_of_pool(planned)
            target = bound if capacity is None else capacity
            placement = best_order(planned, orders, target)
            if method == "exact":
                left = start + time_limit - time.perf_counter()
                placement = exact.improve(planned, placement, bound, capacity, left, progress)
            met = met and placement.used[0] <= target
            capacities = placement.used
        for buffer, offset, segment in zip(
            planned, placement.offsets, placement.segments, strict=True
        ):
            offsets[buffer.name], homes[buffer.name] = offset, len(rows) + segment
        rows += zip(placement.used, capacities, [pool] * len(capacities), strict=True)
    used, capacities, names = zip(*rows, strict=True) if rows else ((), (), ())
    made = Plan(
        offsets=offsets,
        segments={buffer.name: homes[buffer.name] for buffer in buffers},
        used=used,
        capacities=capacities,
        pools=names,
        lower_bound=sum(map(bound_of_pool, pools.values())),
        method=method,
        seconds=time.perf_counter() - start,
        capacity_met=met if capacity is not None or method == "exact" else None,
    )
    check(buffers, made)
    return made


def best_order(buffers: Sequence[Buffer], orders: Sequence[Callable], target: int) -> Placement:
    """One segment for the buffers of a pool, by the best of several orders; stop where `target`
    bytes are enough."""
    best = None
    for order in orders:
        placement = place(buffers, order(buffers), fixed=given_offsets(buffers))
        if best is None or placement.used[0] < best.used[0]:
            best = placement
        if best.used[0] <= target:
            break
    return best


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


def _check_given(pools: dict[str, list[Buffer]], cap: int | None) -> None:
    """Refuse offsets that are given and that no plan can keep to."""
    for members in pools.values():
        given = [buffer for buffer in members if buffer.offset is not None]
        if given and cap is not None:
            raise ValueError(
                f"buffer {given[0].name!r} has an offset, {given[0].offset}, and cap makes several "
                "segments, of which an offset names none; leave out one of the two"
            )
        for moment, one, other in overlaps(given, [buffer.offset for buffer in given]):
            raise ValueError(
                f"buffers {one.name!r} and {other.name!r} overlap at operation {moment} at the"
                " offsets "
                f"that are given, {one.offset} and {other.offset}; change one, or leave it out"
            )


def _by_pool(buffers: Sequence[Buffer]) -> dict[str, list[Buffer]]:
    """Buffers by pool, in the order of first appearance, checked for what no plan can solve."""
    if sum(buffer.size + buffer.alignment + (buffer.offset or 0) for buffer in buffers) > LARGEST:
        raise ValueError(
            "sizes, alignments and offsets of all buffers add up to more than 2^62 bytes"
        )
    names: set[str] = set()
    pools: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        if buffer.name in names:
            raise ValueError(f"two buffers are called {buffer.name!r}; names must differ")
        names.add(buffer.name)
        pools.setdefault(buffer.pool, []).append(buffer)
    return pools
