"""Buffers, live loads, and the check of plans."""

import itertools
import random
from dataclasses import replace

import pytest

from lsq.memory.buffer import SHOWN, Buffer, Plan, check, live_load, overlaps
from lsq.memory.planner import plan
from tests.memory.instances import buffers_of, guillotine

BUFFERS = [
    *buffers_of((8, 0, 2), (8, 2, 4), alignment=8),
    Buffer(name="third", size=8, first=2, last=5, alignment=8),
    Buffer(name="empty", size=0, first=0, last=9, alignment=8),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": -1}, "'x': size is -1; it must be a whole number from 0 to"),
        ({"size": 2**62 + 1}, "size is 4611686018427387905"),
        ({"size": 1.5}, "size is 1.5"),
        ({"first": 3, "last": 2}, "lives from 3 to 2"),
        ({"alignment": 0}, "alignment is 0"),
        ({"alignment": 24}, "alignment is 24; it must be a power of two"),
        ({"offset": -256}, "offset is -256"),
        ({"offset": 8}, "offset is 8; it must be a multiple of its alignment, 256"),
    ],
)
def test_wrong_buffers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Buffer(**{"name": "x", "size": 1, "first": 0, "last": 3, **change})


def test_live_load_lower_bound_and_gap():
    buffers = buffers_of((10, 0, 2), (5, 2, 3), (7, 3, 3))
    assert live_load(buffers) == [(0, 10), (2, 15), (3, 12), (4, 0)]
    assert plan([]).lower_bound == 0 and plan(buffers).lower_bound == 15
    fixed = Buffer(name="y", size=6, first=5, last=5, offset=256)
    assert plan([*buffers, fixed]).lower_bound == 262
    made = Plan(offsets={}, peak=15, lower_bound=12, method="", seconds=0.0)
    assert made.gap == 0.25 and replace(made, peak=0, lower_bound=0).gap == 0.0


def moved(made, **offsets):
    return replace(made, offsets={**made.offsets, **offsets})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda made: moved(made, a=0, b=0), "overlap: 'a' and 'b' at operation 2"),
        (lambda made: moved(made, a=-8), "negative offset: 'a' lies at -8"),
        (lambda made: moved(made, a=4), "misaligned: 'a' lies at 4, which is no multiple of 8"),
        (lambda made: moved(made, a=24), "beyond the peak: 'a' ends at 32 of 24"),
        (lambda made: replace(made, peak=16), "beyond the peak: 'third' ends at 24"),
        (lambda made: moved(made, stranger=0), "unknown: 'stranger'"),
        (lambda made: replace(made, offsets={"a": 0}), "no offset: 'b'; no offset: 'empty'"),
    ],
)
def test_every_fault_is_named(change, fault):
    made = plan(BUFFERS)
    check(BUFFERS, made)
    with pytest.raises(ValueError, match=fault):
        check(BUFFERS, change(made))


def test_a_changed_buffer_is_a_fault():
    made = plan(BUFFERS)
    with pytest.raises(ValueError, match="moved: 'a' lies at "):
        check([replace(BUFFERS[0], offset=made.offsets["a"] + 8), *BUFFERS[1:]], made)
    a, b = buffers_of((8, 0, 1), (8, 2, 3))
    made = plan([a, b])
    assert made.peak == 8
    with pytest.raises(ValueError, match="is wrong: overlap: 'a' and 'b' at operation 2$"):
        check([replace(a, last=2), b], made)


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
        pairs = itertools.combinations(zip(buffers, offsets, strict=True), 2)
        expected = any(
            one.first <= other.last
            and other.first <= one.last
            and a < b + other.size
            and b < a + one.size
            for (one, a), (other, b) in pairs
        )
        assert bool(list(overlaps(buffers, offsets))) == expected
