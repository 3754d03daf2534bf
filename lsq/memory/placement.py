"""Best fit: every block goes where it wastes least among those placed before it.

With one segment this is algorithm 3 of Pisarchyk and Lee 2020 (Efficient Memory Management for Deep
Neural Net Inference): the smallest gap between blocks that are alive at the same time, else above
them all. With several segments, what makes the sum of capacities grow least comes first, and empty
segments last. lsq/csrc/cpu/planner.cpp does the same; `reference` is what it is tested against, and
what runs where the library is not built.
"""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lsq.memory.buffer import LARGEST
from lsq.native import loader

UNPLACED = -1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where blocks lie."""

    offsets: list[int]
    """Bytes from the start of the segment."""
    segments: list[int]
    """Index of the segment; UNPLACED where a block fits into none."""
    used: list[int]
    """Bytes up to the end of the highest block, per segment that may be used."""


def place(
    blocks: Sequence,
    order: Sequence[int],
    limits: Sequence[int] = (LARGEST,),
    granularity: int = 1,
    fixed: Mapping[int, int] | None = None,
) -> Placement:
    """Place blocks one after the other.

    Args:
        blocks: each has size (above 0), first, last and alignment, as a Buffer has.
        order: indices into `blocks`.
        limits: largest capacity in bytes of every segment that may be used. Of those that are still
            empty, only the first that is large enough is considered.
        granularity: capacities are multiples of so many bytes, or their limit.
        fixed: offsets that are given, by index; those blocks go first, into segment 0.
    """
    fixed = fixed or {}
    order = [*(i for i in order if i in fixed), *(i for i in order if i not in fixed)]
    run = _fused if loader.available() else reference
    return run(blocks, order, limits, granularity, fixed)


def reference(
    blocks: Sequence,
    order: Sequence[int],
    limits: Sequence[int],
    granularity: int,
    fixed: Mapping[int, int],
) -> Placement:
    """The plain implementation; `order` begins with the blocks that have fixed offsets."""
    offsets, segments, used = [0] * len(blocks), [UNPLACED] * len(blocks), [0] * len(limits)
    # per segment, (offset, block) in order of offset
    placed: list[list[tuple[int, int]]] = [[] for _ in limits]
    for i in order:
        block = blocks[i]
        empty = next(
            (s for s, limit in enumerate(limits) if not placed[s] and limit >= block.size), None
        )
        found = []
        for segment, limit in enumerate(limits):
            if placed[segment] or segment == empty:
                neighbours = [
                    (offset, offset + blocks[j].size)
                    for offset, j in placed[segment]
                    if blocks[j].first <= block.last and block.first <= blocks[j].last
                ]
                for cost, offset in _places(block, neighbours, limit, used[segment], granularity):
                    found.append((cost, segment, offset))
        if i in fixed:
            found = [(None, 0, fixed[i])] if fixed[i] + block.size <= limits[0] else []
        if found:
            _, segments[i], offsets[i] = min(found)
            insort(placed[segments[i]], (offsets[i], i))
            used[segments[i]] = max(used[segments[i]], offsets[i] + block.size)
    return Placement(offsets=offsets, segments=segments, used=used)


def capacity_of(used: int, limit: int, granularity: int) -> int:
    """Bytes to allocate for `used` bytes: the next multiple of `granularity`, but not above the
    limit."""
    return min(limit, -(-used // granularity) * granularity)


def _places(
    block, neighbours: Sequence[tuple[int, int]], limit: int, used: int, granularity: int
) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield (cost, offset) of every place in a segment; cost: growth, kind, bytes left free beside
    it.

    Kinds: 0 is a gap, 1 above all neighbours, 2 in an empty segment. `neighbours` are the (offset,
    end) of blocks that are alive at the same time, in order of offset.
    """
    start = 0
    for offset, end in neighbours:
        if start + block.size <= offset:
            yield (0, 0, offset - start), start
        start = max(start, -(-end // block.alignment) * block.alignment)
    end = start + block.size
    if end <= limit:
        capacity = capacity_of(max(used, end), limit, granularity)
        yield (
            (capacity - capacity_of(used, limit, granularity), 1 if used else 2, capacity - end),
            start,
        )


def _fused(
    blocks: Sequence,
    order: Sequence[int],
    limits: Sequence[int],
    granularity: int,
    fixed: Mapping[int, int],
) -> Placement:
    numbers = {"dtype": torch.int64, "device": "cpu"}  # whatever torch.set_default_device says
    wanted, limit = torch.tensor(order, **numbers), torch.tensor(limits, **numbers)
    offsets, segments = (
        torch.zeros(len(blocks), **numbers),
        torch.full((len(blocks),), UNPLACED, **numbers),
    )
    used = torch.zeros_like(limit)
    rows = table(blocks, fixed)
    loader.call(
        "lsq_place",
        rows,
        wanted,
        len(order),
        limit,
        len(limits),
        granularity,
        offsets,
        segments,
        used,
    )
    return Placement(offsets=offsets.tolist(), segments=segments.tolist(), used=used.tolist())


def table(blocks: Sequence, fixed: Mapping[int, int]) -> torch.Tensor:
    """What C++ reads of blocks (struct Buffer of lsq/csrc/cpu/planner.h): int64 [n, 5]."""
    rows = [
        (b.size, b.first, b.last, b.alignment, fixed.get(i, UNPLACED)) for i, b in enumerate(blocks)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)
