import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lsq.memory import planner
from lsq.memory.buffer import Buffer
from lsq.memory.placement import Placement
from lsq.memory.planner import (
    GRANULARITY,
    METHODS,
    busiest_loads,
    by_area,
    by_load,
    by_size,
    by_start,
    plan,
)
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

UNIT = GRANULARITY
GREEDY = [method for method in METHODS if method != "exact"]
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def test_orders():
    buffers = buffers_of((6, 0, 1), (5, 1, 2), (7, 4, 5), (3, 2, 4))  # loads 6, 11, 8, 3, 10, 7
    assert by_load(buffers) == [0, 1, 2, 3]
    assert by_size(buffers) == by_area(buffers) == [2, 0, 1, 3]
    assert by_start(buffers) == [0, 1, 3, 2]
    assert by_load(buffers_of((9, 8, 9), (4, 2, 3), (4, 0, 3), (5, 1, 3))) == [3, 2, 1, 0]


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


def test_a_training_is_packed_without_a_gap():
    """Saved values live from their operation to its mirror image; temporaries pass by."""
    saved = [Buffer(name=f"s{i}", size=512 * (1 + i % 3), first=i, last=39 - i) for i in range(20)]
    passing = [Buffer(name=f"t{i}", size=2048, first=i, last=i + 1) for i in range(39)]
    made = plan([*saved, *passing])
    assert made.peak == made.lower_bound and made.gap == 0.0


def test_a_wrong_plan_is_found(monkeypatch):
    wrong = Placement(offsets=[0, 3], segments=[0, 0], used=[7])
    monkeypatch.setattr(planner, "place", lambda *args, **options: wrong)
    with pytest.raises(ValueError, match="the plan is wrong: overlap: 'a' and 'b' .* operation 2"):
        plan(buffers_of((4, 0, 2), (4, 2, 3)))


def test_the_published_order_by_size():
    """Worked by hand: 5 and 4 are stacked, 3 fills the gap that the end of 5 leaves, 2 goes
    above."""
    buffers = buffers_of((2, 0, 3), (5, 0, 1), (4, 1, 2), (3, 2, 3))
    made = plan(buffers, method="greedy_by_size")
    assert made.offsets == {"b": 0, "c": 5, "d": 0, "a": 9}
    assert (made.peak, made.lower_bound, made.segments["a"]) == (11, 11, 0)


def test_the_smallest_gap_is_taken():
    buffers = buffers_of((10, 0, 1), (9, 0, 9), (6, 0, 1), (5, 0, 9), (4, 5, 6))
    made = plan(buffers, method="greedy_by_size")
    assert [made.offsets[name] for name in "abcd"] == [0, 10, 19, 25]
    assert made.offsets["e"] == 19  # the gap of 6 rather than that of 10


def test_equal_sizes_are_placed_as_given():
    made = plan(buffers_of((4, 0, 0), (4, 0, 0), (4, 0, 0)), method="greedy_by_size")
    assert made.offsets == {"a": 0, "b": 4, "c": 8}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_and_empty_buffers(method):
    assert plan([], method=method).peak == 0
    made = plan(buffers_of((0, 0, 5), (0, 2, 3)), method=method)
    assert made.offsets == {"a": 0, "b": 0} and made.used == (0,) and made.gap == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_random_plans_are_separate(method):
    generator = random.Random(1)
    for count in (1, 2, 9, 40):
        buffers = random_buffers(generator, count)
        made = plan(buffers, method=method, time_limit=0.2)
        assert_separate(buffers, made)
        assert made.peak >= made.lower_bound and made.method == method


@pytest.mark.parametrize("method", GREEDY)
def test_plans_are_deterministic(method):
    buffers = random_buffers(random.Random(2), 60)
    assert plan(buffers, method=method).offsets == plan(buffers, method=method).offsets


def test_the_portfolio_is_at_least_as_good_as_its_parts():
    generator = random.Random(3)
    for _ in range(20):
        buffers = random_buffers(generator, 30)
        parts = [plan(buffers, method=method).peak for method in GREEDY]
        assert plan(buffers).peak == min(parts)


@pytest.mark.parametrize("method", GREEDY)
def test_without_a_library_plans_are_the_same(method, monkeypatch):
    buffers = random_buffers(random.Random(4), 50)
    options = ({}, {"cap": 3000})
    made = [plan(buffers, method=method, **option) for option in options]
    monkeypatch.setattr(loader, "library", lambda: None)
    for option, expected in zip(options, made, strict=True):
        found = plan(buffers, method=method, **option)
        assert (found.offsets, found.segments) == (expected.offsets, expected.segments)


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
        made = plan(buffers, method=method)
        assert_separate(buffers, made)
        assert made.lower_bound <= made.peak


@pytest.mark.parametrize("method", METHODS)
def test_others_are_placed_around_a_given_offset(method):
    buffers = buffers_of((4, 0, 9), (4, 3, 6), (2, 0, 0), (0, 1, 1))
    fixed = [replace(buffers[0], offset=8), *buffers[1:3], replace(buffers[3], offset=7)]
    made = plan(fixed, method=method)
    assert made.offsets == {"a": 8, "b": 0, "c": 0, "d": 7}
    assert made.peak == made.lower_bound == 12


def test_offsets_that_no_plan_can_keep_to_are_refused():
    a, b = buffers_of((4, 0, 3), (4, 3, 6))
    with pytest.raises(
        ValueError, match="'a' and 'b' overlap at operation 3 at the offsets .*, 0 and 3"
    ):
        plan([replace(a, offset=0), replace(b, offset=3)])
    with pytest.raises(ValueError, match="'b' has an offset, 3, and cap makes several segments"):
        plan([a, replace(b, offset=3)], cap=8)


@pytest.mark.parametrize("method", GREEDY)
def test_scaling_sizes_scales_the_plan(method):
    buffers = random_buffers(random.Random(5), 40, alignments=(1,))
    made = plan(buffers, method=method)
    scaled = plan([replace(buffer, size=3 * buffer.size) for buffer in buffers], method=method)
    assert scaled.offsets == {name: 3 * offset for name, offset in made.offsets.items()}


def test_stretched_time_keeps_the_plan():
    buffers = random_buffers(random.Random(6), 40)
    stretched = [
        replace(buffer, first=7 * buffer.first - 50, last=7 * buffer.last - 50)
        for buffer in buffers
    ]
    for method in ("greedy_by_size", "greedy_by_load"):
        assert plan(stretched, method=method).offsets == plan(buffers, method=method).offsets


@pytest.mark.parametrize("method", GREEDY)
def test_reversed_time_keeps_plans_right(method):
    buffers = random_buffers(random.Random(7), 40)
    made = plan(
        [replace(buffer, first=-buffer.last, last=-buffer.first) for buffer in buffers],
        method=method,
    )
    assert_separate(buffers, made)


def test_renaming_changes_nothing():
    buffers = random_buffers(random.Random(8), 40)
    renamed = plan([replace(buffer, name=f"other {buffer.name}") for buffer in buffers])
    assert renamed.offsets == {
        f"other {name}": offset for name, offset in plan(buffers).offsets.items()
    }


def test_capacity_is_judged():
    buffers = buffers_of((8, 0, 1), (8, 1, 2))
    assert plan(buffers).capacity_met is None
    assert plan(buffers, capacity=16).capacity_met is True
    assert plan(buffers, capacity=15).capacity_met is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method is 'best'; allowed: 'greedy_by_load'"),
        ({"cap": 0}, "cap is 0"),
        ({"capacity": 2**63}, "capacity is 9223372036854775808"),
        ({"capacity": 8, "cap": 8}, "capacity bounds one segment"),
        ({"method": "exact", "cap": 8}, "plans one segment"),
        ({"time_limit": 0}, "time_limit is 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan(buffers_of((1, 0, 0)), **options)


def test_two_buffers_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two buffers are called 'a'; names must differ"):
        plan([*buffers_of((1, 0, 0)), *buffers_of((2, 3, 4))])


def test_too_many_bytes_are_refused():
    with pytest.raises(ValueError, match="add up to more than"):
        plan(buffers_of((2**61, 0, 0), (2**61, 5, 5)))


def test_twenty_thousand_buffers():
    buffers = guillotine(random.Random(9), 20000, height=2**40, width=2**30)
    made = plan(buffers, method="greedy_by_load")
    assert made.lower_bound == 2**40 and made.gap < 1


def test_capacities_are_rounded_up():
    made = plan(buffers_of((5, 0, 1), (UNIT, 1, 2)), cap=10 * UNIT)
    assert made.used == (UNIT + 5,) and made.capacities == (2 * UNIT,)
    assert made.peak == UNIT + 5


def test_a_segment_is_filled_before_the_next_is_opened():
    made = plan(buffers_of(*[(UNIT, 0, 1)] * 5), cap=2 * UNIT)
    assert made.capacities == (2 * UNIT, 2 * UNIT, UNIT)
    assert sorted(made.segments.values()) == [0, 0, 1, 1, 2]


def test_an_empty_segment_is_the_last_resort():
    """b and c make a segment of their own grow no more than the first one, where they leave less
    free."""
    made = plan(buffers_of((3 * UNIT // 2, 0, 1), (UNIT, 0, 1), (UNIT, 0, 1)), cap=8 * UNIT)
    assert made.capacities == (4 * UNIT,)


def test_what_grows_nothing_comes_first():
    """c takes the place of b, which is dead by then."""
    made = plan(buffers_of((3 * UNIT, 0, 9), (2 * UNIT, 0, 4), (2 * UNIT, 5, 9)), cap=4 * UNIT)
    assert (
        made.segments["b"] == made.segments["c"] == 1 and sum(made.capacities) == made.lower_bound
    )


@pytest.mark.parametrize("cap", [1100, 2000, 10**9])
def test_random_plans_keep_to_the_cap(cap):
    generator = random.Random(1)
    for count in (5, 20, 100):
        buffers = random_buffers(generator, count)
        made = plan(buffers, cap=cap)
        assert_separate(buffers, made)
        assert all(
            used <= capacity <= cap
            for used, capacity in zip(made.used, made.capacities, strict=True)
        )
        assert made.peak >= made.lower_bound and all(made.used)


def test_a_buffer_that_is_too_large():
    with pytest.raises(ValueError, match="'b' has 100 bytes, but the largest segment may have 99"):
        plan(buffers_of((7, 0, 1), (100, 0, 1)), cap=99)
