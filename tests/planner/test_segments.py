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
    """b and c make a segment of their own grow no more than the first one, where they leave less free."""
    made = plan(buffers_of((3 * UNIT // 2, 0, 1), (UNIT, 0, 1), (UNIT, 0, 1)), cap=8 * UNIT)
    assert made.capacities == (4 * UNIT,)


def test_what_grows_nothing_comes_first():
    """c takes the place of b, which is dead by then."""
    made = plan(buffers_of((3 * UNIT, 0, 9), (2 * UNIT, 0, 4), (2 * UNIT, 5, 9)), cap=4 * UNIT)
    assert made.segments["b"] == made.segments["c"] == 1 and sum(made.capacities) == made.lower_bound


@pytest.mark.parametrize("cap", [1100, 2000, 10**9])
def test_random_plans_keep_to_the_cap(cap):
    generator = random.Random(1)
    for count in (5, 20, 100):
        buffers = random_buffers(generator, count)
        made = plan(buffers, cap=cap)
        assert_separate(buffers, made)
        assert all(used <= capacity <= cap for used, capacity in zip(made.used, made.capacities, strict=True))
        assert made.peak >= made.lower_bound and all(made.used)


def test_free_blocks_are_used_by_their_index():
    buffers = buffers_of((5 * UNIT, 0, 1), (3 * UNIT, 0, 1), (3 * UNIT, 2, 3))
    made = plan(buffers, blocks=[2 * UNIT, 4 * UNIT, UNIT, 6 * UNIT])
    assert_separate(buffers, made)
    assert made.segments == {"a": 3, "b": 1, "c": 1} or made.segments == {"a": 3, "b": 1, "c": 3}
    assert made.capacities == (0, 3 * UNIT, 0, 5 * UNIT)
    assert made.pools == ("", "default", "", "default")


def test_pools_do_not_share_blocks():
    buffers = [Buffer(name=name, size=UNIT, first=0, last=1, pool=name) for name in ("a", "b")]
    made = plan(buffers, blocks=[UNIT, 2 * UNIT])
    assert sorted(made.segments.values()) == [0, 1] and set(made.pools) == {"a", "b"}
    with pytest.raises(ValueError, match="1 blocks are too few"):
        plan(buffers, blocks=[UNIT])


def test_fixed_buffers_lie_in_the_first_segment():
    buffers = [*buffers_of((70, 0, 5), (60, 0, 5)), Buffer(name="x", size=20, first=0, last=5, alignment=1, offset=50)]
    made = plan(buffers, blocks=[80, 200])
    assert_separate(buffers, made)
    assert made.segments == {"a": 1, "b": 1, "x": 0}
    with pytest.raises(ValueError, match="'x' ends at 70 bytes, but its segment, the first, may have 65"):
        plan(buffers, blocks=[65, 200])


@pytest.mark.parametrize("options", [{"cap": 99}, {"blocks": [50, 99]}])
def test_a_buffer_that_is_too_large(options):
    with pytest.raises(ValueError, match="'b' has 100 bytes, but the largest segment may have 99"):
        plan(buffers_of((7, 0, 1), (100, 0, 1)), **options)


def test_blocks_that_are_too_small_together():
    with pytest.raises(ValueError, match="of 15 bytes in 2 blocks, buffers of 9 bytes find no place"):
        plan(buffers_of((9, 0, 1), (9, 0, 1)), blocks=[10, 5])
