"""Several segments instead of one, filled up to a given size.

LightSeq cuts a finished plan wherever no buffer crosses, which leaves the sizes of the pieces to
chance. `fill` chooses segment and offset together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lsq.memory.placement import Placement, capacity_of, place
from lsq.planner.buffer import Buffer

GRANULARITY = 2 * 2**20
"""Bytes; capacities are multiples of this, as CUDA's virtual memory has them."""


def fill(
    buffers: Sequence[Buffer], orders: Sequence[Callable], cap: int
) -> tuple[Placement, list[int]]:
    """Place buffers of one pool into segments of at most `cap` bytes each: also the bytes to
    allocate per segment.

    Of all orders, the one wins that has the smallest (sum of capacities, number of segments,
    largest segment).

    Raises:
        ValueError: a buffer is larger than every segment.
    """
    for buffer in buffers:
        if buffer.size > cap:
            raise ValueError(
                f"buffer {buffer.name!r} has {buffer.size} bytes, but the largest segment may have"
                f" {cap}"
            )
    found = []
    for order in orders:
        placement = place(buffers, order(buffers), [cap] * max(1, len(buffers)), GRANULARITY)
        count = max(1, sum(used > 0 for used in placement.used))  # those behind are empty
        capacities = [capacity_of(used, cap, GRANULARITY) for used in placement.used[:count]]
        found.append((replace(placement, used=placement.used[:count]), capacities))
    return min(found, key=lambda one: (sum(one[1]), len(one[1]), max(one[1])))
