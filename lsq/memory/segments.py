"""Several segments instead of one: filled up to given sizes, or cut from a finished plan.

LightSeq cuts a finished plan wherever no buffer crosses, which leaves the sizes of the pieces to chance. `fill`
chooses segment and offset together, so that the pieces fit into free memory that is not in one piece.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lsq.memory.buffer import Block, Buffer, Plan
from lsq.memory.placement import UNPLACED, Placement, capacity_of, place

GRANULARITY = 2 * 2**20
"""Bytes; capacities are multiples of this, as CUDA's virtual memory has them."""


def fill(blocks: Sequence[Block], orders: Sequence[Callable], limits: Sequence[int]) -> Placement:
    """Place blocks of one pool into segments of at most `limits` bytes each.

    Of all orders, and of the segments from the largest and from the smallest, the one wins that has the smallest
    (sum of capacities, number of segments, largest segment).

    Raises:
        ValueError: a block is larger than every segment, or they are too small together.
    """
    for block in blocks:
        if block.size > max(limits):
            raise ValueError(
                f"buffer {block.names[0]!r} has {block.size} bytes, but the largest segment may have {max(limits)}"
            )
        if block.offset is not None and block.offset + block.size > limits[0]:
            raise ValueError(
                f"the fixed buffer {block.names[0]!r} ends at {block.offset + block.size} bytes, but its segment, the "
                f"first, may have {limits[0]}"
            )
    ascending = sorted(range(len(limits)), key=lambda segment: limits[segment])
    sequences = [ascending, ascending[::-1]] if limits[ascending[0]] < limits[ascending[-1]] else [ascending]
    if any(block.offset is not None for block in blocks):
        sequences = [list(range(len(limits)))]
    found = []
    for order in orders:
        wanted = order(blocks)
        for sequence in sequences:
            placement = place(blocks, wanted, [limits[segment] for segment in sequence], GRANULARITY)
            found.append(_renumbered(placement, sequence))
    complete = [placement for placement in found if UNPLACED not in placement.segments]
    if not complete:
        left_out = min(sum(b.size for b, s in zip(blocks, p.segments, strict=True) if s == UNPLACED) for p in found)
        raise ValueError(
            f"the free blocks are too small: of {sum(limits)} bytes in {len(limits)} blocks, "
            f"buffers of {left_out} bytes find no place; give more or larger ones"
        )
    return min(complete, key=lambda placement: _objective(capacities(placement, limits)))


def capacities(placement: Placement, limits: Sequence[int]) -> list[int]:
    """Bytes to allocate per segment."""
    return [capacity_of(used, limit, GRANULARITY) for used, limit in zip(placement.used, limits, strict=True)]


def _objective(sizes: Sequence[int]) -> tuple[int, int, int]:
    return sum(sizes), sum(size > 0 for size in sizes), max(sizes)


def _renumbered(placement: Placement, sequence: Sequence[int]) -> Placement:
    """Segment s of the placement is segment sequence[s] of the limits."""
    used = [0] * len(sequence)
    for number, segment in enumerate(sequence):
        used[segment] = placement.used[number]
    segments = [segment if segment == UNPLACED else sequence[segment] for segment in placement.segments]
    return replace(placement, segments=segments, used=used)


def cut(plan: Plan, buffers: Iterable[Buffer]) -> Plan:
    """Cut every segment of a plan at every offset that no buffer crosses, as LightSeq does.

    Offsets stay multiples of the strictest alignment of all buffers. Nothing is rounded up.

    Raises:
        ValueError: a buffer has a fixed offset, which a cut would change.
    """
    buffers = [buffer for buffer in buffers if buffer.size]
    fixed = [buffer.name for buffer in buffers if buffer.offset is not None]
    if fixed:
        raise ValueError(f"buffer {fixed[0]!r} has a fixed offset; a plan with fixed offsets cannot be cut")
    alignment = max((buffer.alignment for buffer in buffers), default=1)
    offsets, segments = dict.fromkeys(plan.offsets, 0), {}
    used, pools, starts = [], [], []
    for segment, pool in enumerate(plan.pools):
        used.append(0)
        pools.append(pool)
        starts.append(0)
        first = len(used) - 1
        segments.update({name: first for name, index in plan.segments.items() if index == segment})
        members = sorted((b for b in buffers if plan.segments[b.name] == segment), key=lambda b: plan.offsets[b.name])
        for buffer in members:
            offset = plan.offsets[buffer.name]
            start = offset - offset % alignment
            if used[-1] and start >= starts[-1] + used[-1]:
                used.append(0)
                pools.append(pool)
                starts.append(start)
            offsets[buffer.name], segments[buffer.name] = offset - starts[-1], len(used) - 1
            used[-1] = max(used[-1], offsets[buffer.name] + buffer.size)
    return replace(
        plan,
        offsets=offsets,
        segments=segments,
        used=tuple(used),
        capacities=tuple(used),
        pools=tuple(pools),
        method=f"{plan.method}, cut",
        capacity_met=None,
    )
