"""Buffers with their lives, plans of their offsets, and the check that a plan is right."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LARGEST = 2**62
"""Sizes, offsets and operation indices stay below this, so that sums of two fit into 64 bits."""
DEFAULT_ALIGNMENT = 256
"""Bytes: what cudaMalloc gives, and more than any vector instruction needs."""
SHOWN = 5
"""Faults that an error message lists."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Bytes that hold one value from the operation that writes it to the last one that reads it.

    Raises:
        ValueError: a number is out of range, the life is empty, or the offset is not aligned.
    """

    name: str
    size: int
    """Bytes; 0 is allowed and occupies nothing."""
    first: int
    last: int
    """Indices of the first and last operation that use it."""
    alignment: int = DEFAULT_ALIGNMENT
    """The offset is a multiple of this power of two."""
    offset: int | None = None
    """Bytes from the start of the memory, fixed; None: the planner chooses."""

    def __post_init__(self):
        ranges = {"size": 0, "first": -LARGEST, "last": -LARGEST, "alignment": 1, "offset": 0}
        for name, lowest in ranges.items():
            value = getattr(self, name)
            in_range = isinstance(value, int) and lowest <= value <= LARGEST
            if not in_range and not (name == "offset" and value is None):
                self._refuse(
                    f"{name} is {value!r}; it must be a whole number from {lowest} to 2^62"
                )
        if self.last < self.first:
            self._refuse(
                f"it lives from {self.first} to {self.last}; last must not be before first"
            )
        if self.alignment & (self.alignment - 1):
            self._refuse(f"alignment is {self.alignment}; it must be a power of two")
        if (self.offset or 0) % self.alignment:
            self._refuse(
                f"offset is {self.offset}; it must be a multiple of its alignment, {self.alignment}"
            )

    def _refuse(self, reason: str) -> None:
        raise ValueError(f"buffer {self.name!r}: {reason}")

    @property
    def operations(self) -> int:
        """Length of its life."""
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The offset of every buffer."""

    offsets: dict[str, int]
    """Buffer -> bytes from the start of the memory."""
    peak: int
    """Bytes up to the end of the highest buffer."""
    lower_bound: int
    """Bytes that every plan needs."""
    method: str
    """The planner's method."""
    seconds: float
    """Time that planning took."""
    capacity_met: bool | None = None
    """Whether the plan keeps to the requested capacity; None without one."""

    @property
    def gap(self) -> float:
        """Peak above the lower bound, relative to it; 0 is optimal."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def live_load(buffers: Iterable[Buffer]) -> list[tuple[int, int]]:
    """(operation, bytes alive from it on) wherever that changes, in order of time."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.size
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - buffer.size
    times = sorted(changes)
    return list(zip(times, itertools.accumulate(map(changes.get, times)), strict=True))


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """Bytes that every plan needs: the largest live load, or the highest fixed end."""
    ends = [each.offset + each.size for each in buffers if each.size and each.offset is not None]
    return max([*(load for _, load in live_load(buffers)), *ends], default=0)


def overlaps(
    buffers: Sequence[Buffer], offsets: Sequence[int]
) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield (operation, a, b) where two buffers share bytes at one time.

    The sweep over time shares nothing with the planner. It keeps the living buffers in order of
    their offsets and compares neighbours: it finds at least one pair if there are any, not every
    pair.
    """
    events = [(each.first, 1, number) for number, each in enumerate(buffers) if each.size]
    events += [(each.last + 1, 0, number) for number, each in enumerate(buffers) if each.size]
    alive: list[tuple[int, int]] = []
    for moment, starts, number in sorted(events):
        entry = (offsets[number], number)
        at = bisect_left(alive, entry)
        if not starts:
            alive.pop(at)
            continue
        insort(alive, entry)
        for (start, below), (end, above) in itertools.pairwise(alive[max(0, at - 1) : at + 2]):
            if start + buffers[below].size > end:
                yield moment, buffers[below], buffers[above]


def check(buffers: Sequence[Buffer], plan: Plan) -> None:
    """Accept a right plan in silence.

    Raises:
        ValueError: the plan is wrong; the message names the first faults.
    """
    faults = list(_faults(buffers, plan))
    if faults:
        more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
        raise ValueError(f"the plan is wrong: {'; '.join(faults[:SHOWN])}{more}")


def _faults(buffers: Sequence[Buffer], plan: Plan) -> Iterator[str]:
    names = {buffer.name for buffer in buffers}
    for name in plan.offsets.keys() - names:
        yield f"unknown: {name!r} has an offset, but is not a buffer"
    missing = sorted(names - plan.offsets.keys())
    if missing:
        yield from (f"no offset: {name!r}" for name in missing)
        return
    offsets = [plan.offsets[buffer.name] for buffer in buffers]
    for buffer, offset in zip(buffers, offsets, strict=True):
        lies = f"{buffer.name!r} lies at {offset}"
        if buffer.offset not in (None, offset):
            yield f"moved: {lies}, but its offset is given as {buffer.offset}"
        if offset < 0:
            yield f"negative offset: {lies}"
        if offset % buffer.alignment:
            yield f"misaligned: {lies}, which is no multiple of {buffer.alignment}"
        if buffer.size and offset + buffer.size > plan.peak:
            yield f"beyond the peak: {buffer.name!r} ends at {offset + buffer.size} of {plan.peak}"
    for time, a, b in overlaps(buffers, offsets):
        yield f"overlap: {a.name!r} and {b.name!r} at operation {time}"
