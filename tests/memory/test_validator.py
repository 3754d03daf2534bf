import random
from dataclasses import replace

import pytest

from lsq.memory.buffer import Buffer
from lsq.memory.planner import plan
from lsq.memory.validator import SHOWN, check, faults, overlaps
from tests.memory.instances import buffers_of, guillotine

BUFFERS = [
    *buffers_of((8, 0, 2), (8, 2, 4), alignment=8),
    Buffer(name="third", size=8, first=2, last=5, alignment=8),
    Buffer(name="empty", size=0, first=0, last=9, alignment=8),
]


@pytest.fixture
def made():
    return plan(BUFFERS)


def moved(made, **offsets):
    return replace(made, offsets={**made.offsets, **offsets})


def test_a_right_plan_has_no_faults(made):
    assert faults(BUFFERS, made) == []
    check(BUFFERS, made)


def test_a_given_offset_stays(made):
    given = [replace(BUFFERS[0], offset=made.offsets["a"] + 8), *BUFFERS[1:]]
    assert any(fault.startswith("moved: 'a' lies at ") for fault in faults(given, made))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda made: moved(made, a=0, b=0), "overlap: 'a' and 'b' in segment 0 at operation 2"),
        (lambda made: moved(made, a=-8), "negative offset: 'a' lies at -8"),
        (lambda made: moved(made, a=4), "misaligned: 'a' lies at 4, which is no multiple of 8"),
        (lambda made: moved(made, a=24), "beyond capacity: 'a' ends at 32, segment 0 at 24"),
        (lambda made: replace(made, used=(16,)), "beyond bytes used: 'third' ends at 24"),
        (
            lambda made: replace(made, segments={**made.segments, "a": 2}),
            "no such segment: 'a' lies in segment 2 of 1",
        ),
        (lambda made: moved(made, stranger=0), "unknown: 'stranger'"),
    ],
)
def test_every_fault_is_named(made, change, fault):
    with pytest.raises(ValueError, match=fault):
        check(BUFFERS, change(made))


def test_missing_buffers_are_named(made):
    assert faults([*BUFFERS, replace(BUFFERS[0], name="new")], made) == ["not placed: 'new'"]


def test_one_life_longer_by_one_is_found():
    buffers = buffers_of((8, 0, 1), (8, 2, 3))
    made = plan(buffers)
    assert made.peak == 8
    assert faults([replace(buffers[0], last=2), buffers[1]], made) == [
        "overlap: 'a' and 'b' in segment 0 at operation 2"
    ]


def test_messages_stay_short():
    buffers = buffers_of(*[(1, 0, 0)] * 20)
    made = plan(buffers)
    with pytest.raises(ValueError, match=rf"\(and {19 - SHOWN} more\)"):
        check(buffers, replace(made, offsets=dict.fromkeys(made.offsets, 0)))


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
