"""Plans of a training step: separate, aligned, the same every time, and checked."""

import random

import pytest

from lsq.memory import planner
from lsq.memory.buffer import Buffer
from lsq.memory.placement import Placement
from lsq.memory.planner import busiest_loads, by_load, overlaps, plan
from tests.planner.instances import buffers_of, guillotine, random_buffers


def test_load_comes_before_size_and_start():
    blocks = buffers_of((9, 8, 9), (4, 2, 3), (4, 0, 3), (5, 1, 3))
    assert by_load(blocks) == [3, 2, 1, 0]


def test_loads_are_those_of_a_plain_count():
    for count in (1, 2, 40):
        blocks = random_buffers(random.Random(count), count)
        expected = [
            max(
                sum(other.size for other in blocks if other.first <= time <= other.last)
                for time in range(block.first, block.last + 1)
            )
            for block in blocks
        ]
        assert busiest_loads(blocks) == expected
    assert busiest_loads([]) == []


@pytest.mark.parametrize("count", [0, 1, 2, 9, 60])
def test_plans_are_separate(count):
    buffers = random_buffers(random.Random(count), count)
    made = plan(buffers)
    assert made.offsets.keys() == {buffer.name for buffer in buffers}
    for number, one in enumerate(buffers):
        assert (
            made.offsets[one.name] % one.alignment == 0
            and made.offsets[one.name] + one.size <= made.peak
        )
        for other in buffers[:number]:
            if one.size and other.size and one.first <= other.last and other.first <= one.last:
                start, after = made.offsets[one.name], made.offsets[other.name]
                assert start + one.size <= after or after + other.size <= start
    assert made.lower_bound <= made.peak and plan(buffers).offsets == made.offsets


def test_a_training_is_packed_without_a_gap():
    """Saved values live from their operation to its mirror image; temporaries pass by."""
    saved = [Buffer(name=f"s{i}", size=512 * (1 + i % 3), first=i, last=39 - i) for i in range(20)]
    passing = [Buffer(name=f"t{i}", size=2048, first=i, last=i + 1) for i in range(39)]
    made = plan([*saved, *passing])
    assert made.peak == made.lower_bound and made.gap == 0.0


def test_a_wrong_plan_is_found(monkeypatch):
    buffers = buffers_of((4, 0, 2), (4, 2, 3))
    monkeypatch.setattr(
        planner, "place", lambda *given: Placement(offsets=[0, 3], segments=[0, 0], used=[7])
    )
    with pytest.raises(RuntimeError, match="the plan is wrong: a and b overlap at operation 2"):
        plan(buffers)


def test_overlaps_are_found_wherever_there_are_any():
    generator = random.Random(5)
    for _ in range(50):
        buffers = guillotine(generator, 12)
        offsets = [generator.randrange(0, 4096) for _ in buffers]
        expected = any(
            one.first <= other.last
            and other.first <= one.last
            and a < b + other.size
            and b < a + one.size
            for i, (one, a) in enumerate(zip(buffers, offsets, strict=True))
            for other, b in list(zip(buffers, offsets, strict=True))[:i]
        )
        assert bool(list(overlaps(buffers, offsets))) == expected
