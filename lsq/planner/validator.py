"""Proof that a plan is right, by a sweep over time that shares nothing with the planner's
search."""

from collections.abc import Iterable, Iterator

from lsq.memory.planner import overlaps
from lsq.planner.buffer import Buffer, Plan

SHOWN = 5
"""Faults that an error message tells."""


def faults(buffers: Iterable[Buffer], plan: Plan) -> list[str]:
    """Everything that is wrong with a plan, one sentence each; an empty list proves that it is
    right."""
    buffers = list(buffers)
    known = {buffer.name for buffer in buffers}
    found = [
        f"unknown: {name!r} is placed, but is not a buffer"
        for name in plan.offsets
        if name not in known
    ]
    missing = [name for name in known if name not in plan.offsets or name not in plan.segments]
    if missing:
        return found + [f"not placed: {name!r}" for name in sorted(missing)]
    for buffer in buffers:
        found += _faults_of_buffer(buffer, plan)
    for segment, members in sorted(_by_segment(buffers, plan).items()):
        offsets = [plan.offsets[buffer.name] for buffer in members]
        for time, one, other in overlaps(members, offsets):
            found.append(
                f"overlap: {one.name!r} and {other.name!r} in segment {segment} at operation {time}"
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
    if plan.pools[segment] != buffer.pool:
        yield (
            f"pools mixed: {name!r} of pool {buffer.pool!r} lies in segment {segment} of"
            f" {plan.pools[segment]!r}"
        )
        return
    if buffer.offset not in (None, offset):
        yield f"moved: {name!r} lies at {offset}, but its offset is given as {buffer.offset}"
    if offset < 0:
        yield f"negative offset: {name!r} lies at {offset}"
    if offset % buffer.alignment:
        yield f"misaligned: {name!r} lies at {offset}, which is no multiple of {buffer.alignment}"
    for what, limit in (("capacity", plan.capacities[segment]), ("bytes used", plan.used[segment])):
        if buffer.size and offset + buffer.size > limit:
            yield (
                f"beyond {what}: {name!r} ends at {offset + buffer.size}, segment {segment} at"
                f" {limit}"
            )


def _by_segment(buffers: Iterable[Buffer], plan: Plan) -> dict[int, list[Buffer]]:
    found: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        found.setdefault(plan.segments[buffer.name], []).append(buffer)
    return found
