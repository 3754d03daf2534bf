"""Buffers and their checks; plans: right, deterministic, as good as their method says, the same in
C++ and Python."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lsq.memory import planner
from lsq.memory.buffers import (
    SHOWN,
    Buffer,
    Plan,
    busiest_loads,
    check,
    live_load,
    overlaps,
)
from lsq.memory.planner import METHODS, plan
from lsq.native import loader
from tests.memory.instances import (
    assert_separate,
    buffers_of,
    given_offsets,
    guillotine,
    random_buffers,
    small_instances,
    smallest_peak,
)

GREEDY = [method for method in METHODS if method != "exact"]
QUICK = settings(max_examples=60, deadline=None, derandomize=True)
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


def test_messages_stay_short():
    buffers = buffers_of(*[(1, 0, 0)] * 20)
    made = plan(buffers)
    with pytest.raises(ValueError, match=rf"\(and {19 - SHOWN} more\)"):
        check(buffers, replace(made, offsets=dict.fromkeys(made.offsets, 0)))


def test_a_changed_buffer_is_a_fault():
    made = plan(BUFFERS)
    with pytest.raises(ValueError, match="moved: 'a' lies at "):
        check([replace(BUFFERS[0], offset=made.offsets["a"] + 8), *BUFFERS[1:]], made)
    a, b = buffers_of((8, 0, 1), (8, 2, 3))
    made = plan([a, b])
    assert made.peak == 8
    with pytest.raises(ValueError, match="is wrong: overlap: 'a' and 'b' at operation 2$"):
        check([replace(a, last=2), b], made)


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


def test_loads_are_those_of_a_plain_count():
    for count in (1, 2, 40):
        buffers = random_buffers(random.Random(count), count)
        expected = [
            max(
                sum(other.size for other in buffers if other.first <= time <= other.last)
                for time in range(buffer.first, buffer.last + 1)
            )
            for buffer in buffers
        ]
        assert busiest_loads(buffers) == expected
    assert busiest_loads([]) == []


def test_a_wrong_plan_is_found(monkeypatch):
    monkeypatch.setattr(planner, "place", lambda *args: [0, 3])
    with pytest.raises(ValueError, match="the plan is wrong: overlap: 'a' and 'b' .* operation 2"):
        plan(buffers_of((4, 0, 2), (4, 2, 3)))


@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        # 5 and 4 are stacked, 3 fills the gap that the end of 5 leaves, 2 goes above
        ([(2, 0, 3), (5, 0, 1), (4, 1, 2), (3, 2, 3)], [9, 0, 5, 0]),
        # the smallest gap: that of 6 rather than that of 10
        ([(10, 0, 1), (9, 0, 9), (6, 0, 1), (5, 0, 9), (4, 5, 6)], [0, 10, 19, 25, 19]),
        # equal sizes as given
        ([(4, 0, 0), (4, 0, 0), (4, 0, 0)], [0, 4, 8]),
    ],
)
def test_the_published_order_by_size(rows, offsets):
    """Worked by hand."""
    made = plan(buffers_of(*rows), method="greedy_by_size")
    assert [made.offsets[name] for name in sorted(made.offsets)] == offsets


@pytest.mark.parametrize("method", METHODS)
def test_plans_of_every_method(method):
    assert plan([], method=method).peak == 0
    made = plan(buffers_of((0, 0, 5), (0, 2, 3)), method=method)
    assert made.offsets == {"a": 0, "b": 0} and made.peak == 0 and made.gap == 0.0
    generator = random.Random(1)
    for count in (1, 2, 9, 40):
        buffers = random_buffers(generator, count)
        made = plan(buffers, method=method, time_limit=0.2)
        assert_separate(buffers, made)
        assert made.method == method


@pytest.mark.parametrize("method", GREEDY)
def test_greedy_plans_depend_on_sizes_and_lives_alone(method, monkeypatch):
    buffers = random_buffers(random.Random(4), 50, alignments=(1,))
    made = plan(buffers, method=method).offsets
    assert plan(buffers, method=method).offsets == made
    scaled = plan([replace(one, size=3 * one.size) for one in buffers], method=method).offsets
    assert scaled == {name: 3 * offset for name, offset in made.items()}
    renamed = plan([replace(one, name=f"other {one.name}") for one in buffers], method=method)
    assert renamed.offsets == {f"other {name}": offset for name, offset in made.items()}
    if method in ("greedy_by_size", "greedy_by_load"):
        stretched = [replace(one, first=7 * one.first, last=7 * one.last) for one in buffers]
        assert plan(stretched, method=method).offsets == made
    reverse = [replace(one, first=-one.last, last=-one.first) for one in buffers]
    assert_separate(reverse, plan(reverse, method=method))
    aligned = random_buffers(random.Random(4), 50)
    made = plan(aligned, method=method).offsets
    monkeypatch.setattr(loader, "library", lambda: None)
    assert plan(aligned, method=method).offsets == made


def test_the_portfolio_is_at_least_as_good_as_its_parts():
    generator = random.Random(3)
    for _ in range(20):
        buffers = random_buffers(generator, 30)
        parts = [plan(buffers, method=method).peak for method in GREEDY]
        assert plan(buffers).peak == min(parts)


@pytest.mark.thorough
@given(small_instances(most=6, alignments=(1, 2, 4)))
@QUICK
def test_no_plan_is_better_than_the_best(buffers):
    best = smallest_peak(buffers)
    for method in GREEDY:
        made = plan(buffers, method=method)
        assert_separate(buffers, made)
        assert made.lower_bound <= best <= made.peak


@given(given_offsets())
@QUICK
def test_given_offsets_stay(buffers):
    for method in GREEDY:
        assert_separate(buffers, plan(buffers, method=method))


@pytest.mark.parametrize("method", METHODS)
def test_others_are_placed_around_a_given_offset(method):
    buffers = buffers_of((4, 0, 9), (4, 3, 6), (2, 0, 0), (0, 1, 1))
    fixed = [replace(buffers[0], offset=8), *buffers[1:3], replace(buffers[3], offset=7)]
    made = plan(fixed, method=method)
    assert made.offsets == {"a": 8, "b": 0, "c": 0, "d": 7}
    assert made.peak == made.lower_bound == 12


def test_capacity_is_judged():
    buffers = buffers_of((8, 0, 1), (8, 1, 2))
    for capacity, met in ((None, None), (16, True), (15, False)):
        assert plan(buffers, capacity=capacity).capacity_met is met


ONE = buffers_of((1, 0, 0))


@pytest.mark.parametrize(
    ("buffers", "options", "message"),
    [
        (ONE, {"method": "best"}, "method is 'best'; allowed: 'greedy_by_load'"),
        (ONE, {"capacity": 2**63}, "capacity is 9223372036854775808"),
        (ONE, {"capacity": 0}, "capacity is 0"),
        (ONE, {"time_limit": 0}, "time_limit is 0"),
        ([*ONE, *ONE], {}, "two buffers are called 'a'; names must differ"),
        (buffers_of((2**61, 0, 0), (2**61, 5, 5)), {}, "add up to more than"),
        (
            [replace(ONE[0], size=4, offset=0), replace(ONE[0], name="b", offset=3)],
            {},
            "'a' and 'b' overlap at operation 0 at the offsets .*, 0 and 3",
        ),
    ],
)
def test_wrong_arguments_are_refused(buffers, options, message):
    with pytest.raises(ValueError, match=message):
        plan(buffers, **options)
