"""Several segments instead of one, filled up to given sizes.

LightSeq cuts a finished plan wherever no buffer crosses, which leaves the sizes of the pieces to chance. `fill`
chooses segment and offset together, so that the pieces fit into free memory that is not in one piece.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lsq.memory.placement import UNPLACED, Placement, capacity_of, place
from lsq.planner.buffer import Block, fixed_offsets

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
            chosen = [limits[segment] for segment in sequence]
            placement = place(blocks, wanted, chosen, GRANULARITY, fixed_offsets(blocks))
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
