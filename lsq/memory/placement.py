"""Best fit: every buffer goes where it wastes least among those placed before it.

With one segment this is algorithm 3 of Pisarchyk and Lee 2020 (Efficient Memory Management for Deep
Neural Net Inference): the smallest gap between buffers that are alive at the same time, else above
them all. With several segments, the smallest growth of the summed capacities comes first, and empty
segments come last. lsq/csrc/cpu/planner.cpp does the same; `reference` is its oracle in tests, and
runs where the library is not built.
"""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lsq.memory.buffer import LARGEST, Buffer
from lsq.native import loader

UNPLACED = -1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets and segments of buffers, by index."""

    offsets: list[int]
    """Bytes from the start of the segment."""
    segments: list[int]
    """Index of the segment; UNPLACED where a buffer fits into none."""
    used: list[int]
    """Bytes up to the end of the highest buffer, per segment that may be used."""


def place(
    buffers: Sequence[Buffer],
    order: Sequence[int],
    limits: Sequence[int] = (LARGEST,),
    granularity: int = 1,
    fixed: Mapping[int, int] | None = None,
) -> Placement:
    """Place buffers one after the other.

    Args:
        buffers: none of size 0.
        order: indices into `buffers`.
        limits: largest capacity in bytes of every segment that may be used. Of empty segments, only
            the first that is large enough is considered.
        granularity: capacities are multiples of so many bytes, or their limit.
        fixed: index -> offset; those buffers go first, into segment 0.
    """
    fixed = fixed or {}
    order = [*(i for i in order if i in fixed), *(i for i in order if i not in fixed)]
    run = _in_cpp if loader.available() else reference
    return run(buffers, order, limits, granularity, fixed)


def reference(
    buffers: Sequence[Buffer],
    order: Sequence[int],
    limits: Sequence[int],
    granularity: int,
    fixed: Mapping[int, int],
) -> Placement:
    """The plain implementation; `order` begins with the buffers that have fixed offsets."""
    offsets, segments, used = [0] * len(buffers), [UNPLACED] * len(buffers), [0] * len(limits)
    # per segment, (offset, index) in order of offset
    placed: list[list[tuple[int, int]]] = [[] for _ in limits]
    for i in order:
        buffer = buffers[i]
        empty = next(
            (s for s, limit in enumerate(limits) if not placed[s] and limit >= buffer.size), None
        )
        candidates = []
        for segment, limit in enumerate(limits):
            if placed[segment] or segment == empty:
                neighbours = [
                    (offset, offset + buffers[j].size)
                    for offset, j in placed[segment]
                    if buffers[j].first <= buffer.last and buffer.first <= buffers[j].last
                ]
                for cost, offset in _offsets(buffer, neighbours, limit, used[segment], granularity):
                    candidates.append((cost, segment, offset))
        if i in fixed:
            candidates = [(None, 0, fixed[i])] if fixed[i] + buffer.size <= limits[0] else []
        if candidates:
            _, segments[i], offsets[i] = min(candidates)
            insort(placed[segments[i]], (offsets[i], i))
            used[segments[i]] = max(used[segments[i]], offsets[i] + buffer.size)
    return Placement(offsets=offsets, segments=segments, used=used)


def capacity_of(used: int, limit: int, granularity: int) -> int:
    """Bytes to allocate for `used` bytes: the next multiple of `granularity`, at most `limit`."""
    return min(limit, -(-used // granularity) * granularity)


def _offsets(
    buffer: Buffer, neighbours: Sequence[tuple[int, int]], limit: int, used: int, granularity: int
) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield (cost, offset) of every choice in a segment; cost: growth, kind, bytes left free.

    Kinds: 0 is a gap, 1 above all neighbours, 2 in an empty segment. `neighbours` are the (offset,
    end) of buffers that are alive at the same time, in order of offset.
    """
    start = 0
    for offset, end in neighbours:
        if start + buffer.size <= offset:
            yield (0, 0, offset - start), start
        start = max(start, -(-end // buffer.alignment) * buffer.alignment)
    end = start + buffer.size
    if end <= limit:
        capacity = capacity_of(max(used, end), limit, granularity)
        growth = capacity - capacity_of(used, limit, granularity)
        yield (growth, 1 if used else 2, capacity - end), start


def _in_cpp(
    buffers: Sequence[Buffer],
    order: Sequence[int],
    limits: Sequence[int],
    granularity: int,
    fixed: Mapping[int, int],
) -> Placement:
    numbers = {"dtype": torch.int64, "device": "cpu"}  # whatever torch.set_default_device says
    indices, limit = torch.tensor(order, **numbers), torch.tensor(limits, **numbers)
    offsets, used = torch.zeros(len(buffers), **numbers), torch.zeros_like(limit)
    segments = torch.full((len(buffers),), UNPLACED, **numbers)
    rows = table(buffers, fixed)
    counts = len(order), limit, len(limits), granularity
    loader.call("lsq_place", rows, indices, *counts, offsets, segments, used)
    return Placement(offsets=offsets.tolist(), segments=segments.tolist(), used=used.tolist())


def table(buffers: Sequence[Buffer], fixed: Mapping[int, int]) -> torch.Tensor:
    """int64 [n, 5], which C++ reads as struct Buffer of lsq/csrc/cpu/planner.h."""
    rows = [
        (b.size, b.first, b.last, b.alignment, fixed.get(i, UNPLACED))
        for i, b in enumerate(buffers)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)
