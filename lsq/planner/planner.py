"""`plan`: offsets for buffers, so that those alive at one time do not overlap and the peak is as low as possible.

The problem is dynamic storage allocation, which is NP-hard. A few greedy orders reach the lower bound on most programs;
`exact` searches where they do not. Every plan is checked by lsq.planner.validator before it is returned.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from lsq.memory.buffer import LARGEST
from lsq.memory.placement import Placement, place
from lsq.memory.planner import overlaps
from lsq.planner import exact, segments
from lsq.planner.buffer import Block, Buffer, Plan, blocks_of, bound_of_pool, fixed_offsets
from lsq.planner.orders import ORDERS
from lsq.planner.validator import check

METHODS = (*ORDERS, "exact")
UNUSED = ""
"""Pool of a free block that no segment was made of."""
TIME_LIMIT = 30.0
"""Seconds that `exact` may take unless told otherwise."""


def plan(
    buffers: Iterable[Buffer],
    *,
    method: str = "portfolio",
    capacity: int | None = None,
    time_limit: float = TIME_LIMIT,
    cap: int | None = None,
    blocks: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Place buffers. The result depends on the arguments alone, unless `exact` runs out of time.

    Args:
        buffers: what to place.
        method: "greedy_by_size" (Pisarchyk and Lee 2020), "greedy_by_load" (by the largest live load during a life),
            "portfolio" (the best of four orders) or "exact" (a search after Moffitt 2023, MiniMalloc; it starts from
            the portfolio, and gives that back where it finds nothing better).
        capacity: bytes that each pool should keep to; `exact` tries to and is content with it. Without it, `exact`
            looks for the smallest peak. The plan says whether the capacity (for `exact` without one, the lower
            bound) was met.
        time_limit: seconds for the search of `exact`. KeyboardInterrupt ends the search, too.
        cap: largest segment in bytes; memory is split into as many segments as that takes, each rounded up to a
            multiple of 2 MiB (or to the cap).
        blocks: bytes of free memory blocks, each of which can become one segment: segment i lies in block i. Rounded
            up likewise; a block that is not needed has capacity 0.
        progress: called by `exact` several times a second with the number of positions tried so far.

    Raises:
        ValueError: an argument or a buffer is wrong, fixed buffers overlap, or the segments are too small.
        LibraryError: `exact` needs the C++ host library, which is not built.
    """
    start = time.perf_counter()
    buffers = list(buffers)
    _check_options(method, capacity, time_limit, cap, blocks)
    pools = _by_pool(blocks_of(buffers))
    orders = ORDERS.get(method, ORDERS["portfolio"])
    free = dict(enumerate(blocks or ()))
    offsets: dict[str, int] = {}
    homes: dict[str, int] = {}
    rows: dict[int, tuple[int, int, str]] = {}  # segment -> (bytes used, capacity, pool)
    met = True
    for pool, members in pools.items():
        planned = [block for block in members if block.size]
        if cap is not None or blocks is not None:
            limits = free if cap is None else dict.fromkeys(range(len(rows), len(rows) + max(1, len(planned))), cap)
            if not limits:
                raise ValueError(f"{len(blocks)} blocks are too few: every pool needs one of its own")
            placement = segments.fill(planned, orders, list(limits.values()))
            indices, capacities = list(limits), segments.capacities(placement, limits.values())
        else:
            bound = bound_of_pool(planned)
            target = bound if capacity is None else capacity
            placement = best_order(planned, orders, target)
            if method == "exact":
                left = start + time_limit - time.perf_counter()
                placement = exact.improve(planned, placement, bound, capacity, left, progress)
            met = met and placement.used[0] <= target
            indices, capacities = [len(rows)], placement.used
        first = next((number for number, used in enumerate(placement.used) if used), 0)
        for number, index in enumerate(indices):
            if placement.used[number] or number == first:
                rows[index] = placement.used[number], capacities[number], pool
                free.pop(index, None)
        for block in members:
            offsets |= dict.fromkeys(block.names, block.offset or 0)
            homes |= dict.fromkeys(block.names, indices[first])
        for block, offset, segment in zip(planned, placement.offsets, placement.segments, strict=True):
            offsets |= dict.fromkeys(block.names, offset)
            homes |= dict.fromkeys(block.names, indices[segment])
    rows |= dict.fromkeys(free, (0, 0, UNUSED))
    used, capacities, names = zip(*(rows[index] for index in sorted(rows)), strict=True) if rows else ((), (), ())
    made = Plan(
        offsets={buffer.name: offsets[buffer.name] for buffer in buffers},
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


def best_order(blocks: Sequence[Block], orders: Sequence[Callable], target: int) -> Placement:
    """Place blocks of one pool into one segment by the best of several orders; stop where `target` bytes are enough."""
    best = None
    for order in orders:
        placement = place(blocks, order(blocks), fixed=fixed_offsets(blocks))
        if best is None or placement.used[0] < best.used[0]:
            best = placement
        if best.used[0] <= target:
            break
    return best


def _check_options(method: str, capacity: int | None, time_limit: float, cap: int | None, blocks: Sequence[int] | None):
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(map(repr, METHODS))}")
    if cap is not None and blocks is not None:
        raise ValueError("cap and blocks are both given; give the size of every segment one way")
    sizes = {"capacity": capacity, "cap": cap, **{f"blocks[{i}]": size for i, size in enumerate(blocks or ())}}
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, int) and 0 < size <= LARGEST):
            raise ValueError(f"{name} is {size!r}; it must be a whole number of bytes from 1 to 2^62")
    if cap is not None or blocks is not None:
        if method == "exact":
            raise ValueError('method is "exact", which plans one segment; leave out cap and blocks, or use "portfolio"')
        if capacity is not None:
            raise ValueError("capacity bounds one segment; with cap or blocks, leave it out")
    if not time_limit > 0:
        raise ValueError(f"time_limit is {time_limit!r}; it must be a number of seconds above 0")


def _by_pool(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Blocks by pool, in the order of first appearance, checked for what no plan can solve."""
    if max((block.offset or 0 for block in blocks), default=0) + sum(b.size + b.alignment for b in blocks) > LARGEST:
        raise ValueError("the sizes, alignments and fixed offsets of all buffers add up to more than 2^62 bytes")
    pools: dict[str, list[Block]] = {}
    for block in blocks:
        pools.setdefault(block.pool, []).append(block)
    for members in pools.values():
        fixed = [block for block in members if block.offset is not None]
        for moment, one, other in overlaps(fixed, [block.offset for block in fixed]):
            raise ValueError(
                f"the fixed buffers {one.names[0]!r} (offset {one.offset}, {one.size} bytes) and {other.names[0]!r} "
                f"(offset {other.offset}, {other.size} bytes) overlap at operation {moment}"
            )
    return pools
