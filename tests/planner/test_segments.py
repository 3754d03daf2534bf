import random

import pytest

from lsq.planner.buffer import Buffer
from lsq.planner.planner import plan
from lsq.planner.segments import GRANULARITY
from tests.planner.instances import assert_separate, buffers_of, random_buffers

UNIT = GRANULARITY


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


def test_pools_have_segments_of_their_own():
    buffers = [
        Buffer(name=name, size=size, first=0, last=1, pool=name)
        for name, size in (("a", UNIT), ("b", 0))
    ]
    made = plan(buffers, cap=UNIT)
    assert (
        made.segments == {"a": 0, "b": 1}
        and made.pools == ("a", "b")
        and made.capacities == (UNIT, 0)
    )


def test_a_buffer_that_is_too_large():
    with pytest.raises(ValueError, match="'b' has 100 bytes, but the largest segment may have 99"):
        plan(buffers_of((7, 0, 1), (100, 0, 1)), cap=99)
