"""Gaps: what is taken never overlaps, what is given back is whole again, and the smallest gap is
used first."""

import random

import pytest

from lsq.memory.gaps import Gaps


def test_the_smallest_gap_that_has_the_bytes_is_taken():
    gaps = Gaps(1000, alignment=1)
    assert [gaps.take(size) for size in (100, 50, 200, 50, 600)] == [0, 100, 150, 350, 400]
    assert gaps.take(1) is None and list(gaps) == []
    gaps.give_back(150, 200)
    gaps.give_back(0, 100)
    gaps.give_back(350, 50)
    assert list(gaps) == [(0, 100), (150, 250)]
    assert gaps.take(90) == 0 and gaps.take(90) == 150 and gaps.take(161) is None
    assert gaps.take(160) == 240 and list(gaps) == [(90, 10)]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_taking_and_giving_back(seed):
    chance, size, alignment = random.Random(seed), 1 << 14, 64
    gaps, taken, owner = Gaps(size, alignment), [], [None] * size
    for number in range(2000):
        if taken and chance.random() < 0.5:
            start, length = taken.pop(chance.randrange(len(taken)))
            assert len(set(owner[start : start + length])) == 1
            owner[start : start + length] = [None] * length
            gaps.give_back(start, length)
        else:
            length = chance.randint(1, 900)
            start = gaps.take(length)
            if start is None:
                assert max((bytes_ for _, bytes_ in gaps), default=0) < length
                continue
            assert start % alignment == 0 and set(owner[start : start + length]) == {None}
            owner[start : start + length] = [number] * length
            taken.append((start, length))
        free = list(gaps)
        assert all(one[0] + one[1] < other[0] for one, other in zip(free, free[1:], strict=False))
    for start, length in taken:
        gaps.give_back(start, length)
    assert list(gaps) == [(0, size)]
