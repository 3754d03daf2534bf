"""Buffers and their lives, plans of their offsets, checks of both, and placement by best fit.

Buffers that are alive at the same time must not overlap.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from lsq.native import loader

NO_OFFSET = -1
"""Stands for None in C++."""
LARGEST = 2**62
"""Sizes, offsets and operation indices stay below this, so that sums of two fit into 64 bits."""
DEFAULT_ALIGNMENT = 256
"""Bytes: the alignment of cudaMalloc, and more than any vector instruction needs."""
SHOWN = 5
"""Most faults that an error message lists."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Bytes that hold a value from the operation that writes it to the last operation that reads
    it. Raises ValueError: a number is out of range, or the offset is not aligned."""

    name: str
    size: int
    """Bytes; 0 is allowed and occupies nothing."""
    first: int
    last: int
    """Indices of the first and last operation that use it."""
    alignment: int = DEFAULT_ALIGNMENT
    """A power of two, of which the offset is a multiple."""
    offset: int | None = None
    """Fixed offset in bytes from the start of the memory; None: the planner chooses."""

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
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The offset of every buffer."""

    offsets: dict[str, int]
    """Name of a buffer -> bytes from the start of the memory."""
    peak: int
    """Bytes up to the end of the highest buffer."""
    lower_bound: int
    """Bytes that every plan needs."""
    method: str
    seconds: float
    """Time of planning."""
    capacity_met: bool | None = None
    """Whether the peak meets the capacity, or for "exact" without one the lower bound; else
    None."""

    @property
    def gap(self) -> float:
        """The peak's excess over the lower bound, relative to the lower bound."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def live_load(buffers: Iterable[Buffer]) -> list[tuple[int, int]]:
    """Return (operation, bytes alive from there on) wherever the bytes change, in order."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.size
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - buffer.size
    times = sorted(changes)
    return list(zip(times, itertools.accumulate(map(changes.get, times)), strict=True))


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """Return the bytes that every plan needs: the largest live load, or the highest fixed end."""
    ends = [each.offset + each.size for each in buffers if each.size and each.offset is not None]
    return max([*(load for _, load in live_load(buffers)), *ends], default=0)


def busiest_loads(buffers: Sequence[Buffer]) -> list[int]:
    """Return the largest live load during each life, in bytes.

    Range maxima by doubling: only the row of maxima over 2^k times is kept at a time.
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


def overlaps(
    buffers: Sequence[Buffer], offsets: Sequence[int]
) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield (operation, a, b) for buffers that share bytes at the same time. Shares no code with
    the planner. Compares neighbours in order of offsets, so it finds at least one pair if there is
    any."""
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
    """Check a plan. Raises ValueError: it is wrong; the message lists the first faults."""
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
    for moment, a, b in overlaps(buffers, offsets):
        yield f"overlap: {a.name!r} and {b.name!r} at operation {moment}"


def by_load(buffers: Sequence[Buffer]) -> list[int]:
    """Order buffers by the largest live load during their life, then size, both descending, then
    start.

    Packs training programs best: buffers that live across the peak must be packed tightly.
    """
    loads = busiest_loads(buffers)
    return sorted(
        range(len(buffers)), key=lambda i: (-loads[i], -buffers[i].size, buffers[i].first)
    )


def by_area(buffers: Sequence[Buffer]) -> list[int]:
    """Order buffers by size times length of life, descending."""
    return sorted(range(len(buffers)), key=lambda i: -buffers[i].size * buffers[i].operations)


def by_size(buffers: Sequence[Buffer]) -> list[int]:
    """Order buffers by size, descending (Pisarchyk and Lee 2020)."""
    return sorted(range(len(buffers)), key=lambda i: -buffers[i].size)


def by_start(buffers: Sequence[Buffer]) -> list[int]:
    """Order buffers by start; at the same start the largest first."""
    return sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -buffers[i].size))


def peak_of(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    ends = (offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True))
    return max(ends, default=0)


def fixed_offsets(buffers: Sequence[Buffer]) -> dict[int, int]:
    return {i: buffer.offset for i, buffer in enumerate(buffers) if buffer.offset is not None}


def place(buffers: Sequence[Buffer], order: Sequence[int], fixed: Mapping[int, int]) -> list[int]:
    """Return the offset of each buffer, placed by best fit (Pisarchyk and Lee 2020, algorithm 3).

    Buffers with `fixed` offsets come first, then the others in `order`. Each goes into the smallest
    gap between buffers that are alive at the same time, or above them all. No buffer has size 0.
    """
    order = [*(i for i in order if i in fixed), *(i for i in order if i not in fixed)]
    if not loader.available():
        return reference(buffers, order, fixed)
    numbers = {"dtype": torch.int64, "device": "cpu"}  # whatever torch.set_default_device says
    indices, offsets = torch.tensor(order, **numbers), torch.zeros(len(buffers), **numbers)
    loader.call("lsq_best_fit", table(buffers, fixed), indices, len(order), offsets)
    return offsets.tolist()


def reference(
    buffers: Sequence[Buffer], order: Sequence[int], fixed: Mapping[int, int]
) -> list[int]:
    """Compute `place` in plain Python. `order` begins with the buffers that have fixed offsets."""
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
    """Return int64 [n, 5], which C++ reads as struct Buffer of lsq/csrc/cpu/planner.cpp."""
    rows = [
        (each.size, each.first, each.last, each.alignment, fixed.get(i, NO_OFFSET))
        for i, each in enumerate(buffers)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)


def check_buffers(buffers: Sequence[Buffer]) -> None:
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
