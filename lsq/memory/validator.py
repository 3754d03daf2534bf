"""Proof that a plan is right, by a sweep over time that shares nothing with the planner."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from lsq.memory.buffer import Buffer, Plan

SHOWN = 5
"""Faults that an error message lists."""


def overlaps(
    buffers: Sequence[Buffer], offsets: Sequence[int]
) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield (operation, a, b) where two buffers share bytes at one time.

    The sweep keeps the living buffers in order of their offsets and compares neighbours: at least
    one pair is found wherever there are any, not every pair.
    """
    events = [(each.first, 1, number) for number, each in enumerate(buffers) if each.size]
    events += [(each.last + 1, 0, number) for number, each in enumerate(buffers) if each.size]
    alive: list[tuple[int, int]] = []
    for moment, starts, number in sorted(events):
        entry = (offsets[number], number)
        if not starts:
            alive.pop(bisect_left(alive, entry))
            continue
        at = bisect_left(alive, entry)
        insort(alive, entry)
        for (start, below), (end, above) in itertools.pairwise(alive[max(0, at - 1) : at + 2]):
            if start + buffers[below].size > end:
                yield moment, buffers[below], buffers[above]


def faults(buffers: Iterable[Buffer], plan: Plan) -> list[str]:
    """Everything that is wrong with a plan, one sentence each; an empty list proves it right."""
    buffers = list(buffers)
    names = {buffer.name for buffer in buffers}
    found = [
        f"unknown: {name!r} is placed, but is not a buffer"
        for name in plan.offsets
        if name not in names
    ]
    missing = [name for name in names if name not in plan.offsets or name not in plan.segments]
    if missing:
        return found + [f"not placed: {name!r}" for name in sorted(missing)]
    by_segment: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        found += _faults_of_buffer(buffer, plan)
        by_segment.setdefault(plan.segments[buffer.name], []).append(buffer)
    for segment, members in sorted(by_segment.items()):
        offsets = [plan.offsets[buffer.name] for buffer in members]
        for time, a, b in overlaps(members, offsets):
            found.append(
                f"overlap: {a.name!r} and {b.name!r} in segment {segment} at operation {time}"
            )
    return found


def check(buffers: Iterable[Buffer], plan: Plan) -> None:
    """Accept a right plan in silence.

    Raises:
        ValueError: the plan is wrong; the message names the first faults.
    """
    found = faults(buffers, plan)
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise ValueError(f"the plan is wrong: {'; '.join(found[:SHOWN])}{more}")


def _faults_of_buffer(buffer: Buffer, plan: Plan) -> Iterator[str]:
    name, offset, segment = buffer.name, plan.offsets[buffer.name], plan.segments[buffer.name]
    if not 0 <= segment < len(plan.capacities):
        yield f"no such segment: {name!r} lies in segment {segment} of {len(plan.capacities)}"
        return
    if buffer.offset not in (None, offset):
        yield f"moved: {name!r} lies at {offset}, but its offset is given as {buffer.offset}"
    if offset < 0:
        yield f"negative offset: {name!r} lies at {offset}"
    if offset % buffer.alignment:
        yield f"misaligned: {name!r} lies at {offset}, which is no multiple of {buffer.alignment}"
    end = offset + buffer.size
    for what, limit in (("capacity", plan.capacities[segment]), ("bytes used", plan.used[segment])):
        if buffer.size and end > limit:
            yield f"beyond {what}: {name!r} ends at {end}, segment {segment} at {limit}"
