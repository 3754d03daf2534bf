"""Buffers for tests, a separate check of plans, and the smallest peak by brute force."""

import itertools
import random
from dataclasses import replace

from hypothesis import strategies

from lsq.memory.buffers import Buffer, Plan


def buffers_of(*rows: tuple[int, ...], alignment: int = 1) -> list[Buffer]:
    """Buffers a, b, c ... from (size, first, last)."""
    return [
        Buffer(name=chr(ord("a") + number), size=size, first=first, last=last, alignment=alignment)
        for number, (size, first, last) in enumerate(rows)
    ]


def random_buffers(
    generator: random.Random, count: int, alignments=(1, 8, 64), largest: int = 1000
) -> list[Buffer]:
    """Buffers of mixed sizes, lives and alignments; some are empty."""
    found = []
    for number in range(count):
        first = generator.randrange(2 * count)
        found.append(
            Buffer(
                name=f"b{number}",
                size=generator.choice(
                    (0, generator.randint(1, largest), generator.randint(1, largest))
                ),
                first=first,
                last=first + generator.randrange(1 + count // 2),
                alignment=generator.choice(alignments),
            )
        )
    return found


def guillotine(
    generator: random.Random, count: int, height: int = 4096, width: int = 1000
) -> list[Buffer]:
    """Cut a rectangle of time by bytes into `count` buffers: a plan with a peak of `height`
    exists."""
    pieces = [(0, width, 0, height)]  # time from, to, offset from, to
    while len(pieces) < count:
        left, right, bottom, top = pieces.pop(generator.randrange(len(pieces)))
        if generator.random() < 0.5 and right - left > 1:
            at = generator.randrange(left + 1, right)
            pieces += [(left, at, bottom, top), (at, right, bottom, top)]
        elif top - bottom > 1:
            at = generator.randrange(bottom + 1, top)
            pieces += [(left, right, bottom, at), (left, right, at, top)]
        else:
            pieces.append((left, right, bottom, top))
    generator.shuffle(pieces)
    return [
        Buffer(name=f"b{number}", size=top - bottom, first=left, last=right - 1, alignment=1)
        for number, (left, right, bottom, top) in enumerate(pieces)
    ]


def assert_separate(buffers: list[Buffer], plan: Plan) -> None:
    """Compare every pair of buffers; every one keeps to its alignment and the peak."""
    assert plan.offsets.keys() == {buffer.name for buffer in buffers}
    assert plan.lower_bound <= plan.peak
    for one, other in itertools.combinations([buffer for buffer in buffers if buffer.size], 2):
        if one.first <= other.last and other.first <= one.last:
            start, after = plan.offsets[one.name], plan.offsets[other.name]
            assert start + one.size <= after or after + other.size <= start, (one, other)
    for buffer in buffers:
        offset = plan.offsets[buffer.name]
        assert offset >= 0 and offset % buffer.alignment == 0
        assert not buffer.size or offset + buffer.size <= plan.peak
        assert buffer.offset in (None, offset)


def smallest_peak(buffers: list[Buffer]) -> int:
    """The optimum: every buffer in the lowest free place, in every order; given offsets
    stay.

    Some order is the order of offsets of an optimal plan whose buffers have all been moved down.
    """
    given = [(one, one.offset, one.offset + one.size) for one in buffers if one.offset is not None]
    best = None
    for order in itertools.permutations([one for one in buffers if one.offset is None]):
        placed = list(given)
        for buffer in order:
            offset = 0
            for other, start, end in sorted(placed, key=lambda one: one[1]):
                together = other.first <= buffer.last and buffer.first <= other.last
                if together and start < offset + buffer.size and offset < end:
                    offset = -(-end // buffer.alignment) * buffer.alignment
            placed.append((buffer, offset, offset + buffer.size))
        peak = max(end for _, _, end in placed)
        best = peak if best is None else min(best, peak)
    return best


@strategies.composite
def small_instances(draw, most: int = 6, alignments: tuple[int, ...] = (1,)) -> list[Buffer]:
    """Hypothesis strategy: up to `most` buffers, none of size 0."""
    rows = strategies.tuples(
        strategies.integers(1, 12),
        strategies.integers(0, 8),
        strategies.integers(0, 5),
        strategies.sampled_from(alignments),
    )
    drawn = draw(strategies.lists(rows, min_size=1, max_size=most))
    return [
        Buffer(name=f"b{number}", size=size, first=first, last=first + length, alignment=alignment)
        for number, (size, first, length, alignment) in enumerate(drawn)
    ]


@strategies.composite
def given_offsets(draw, most: int = 6) -> list[Buffer]:
    """Hypothesis strategy: the same; up to three have offsets at which they do not overlap."""
    buffers, kept = draw(small_instances(most)), []
    for number, buffer in enumerate(buffers[:3]):
        placed = replace(buffer, offset=draw(strategies.none() | strategies.integers(0, 20)))
        if placed.offset is not None and not any(
            one.first <= placed.last
            and placed.first <= one.last
            and one.offset < placed.offset + placed.size
            and placed.offset < one.offset + one.size
            for one in kept
        ):
            kept.append(placed)
            buffers[number] = placed
    return buffers
