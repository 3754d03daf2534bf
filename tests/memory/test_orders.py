import random

from lsq.memory.buffer import blocks_of
from lsq.memory.orders import busiest_loads, by_area, by_load, by_size, by_start
from tests.memory.instances import buffers_of, random_buffers

BLOCKS = blocks_of(buffers_of((6, 0, 1), (5, 1, 2), (7, 4, 5), (3, 2, 4)))
"""Loads over time: 6, 11, 8, 3, 10, 7."""


def test_orders():
    assert busiest_loads(BLOCKS) == [11, 11, 10, 10]
    assert by_load(BLOCKS) == [0, 1, 2, 3]
    assert by_size(BLOCKS) == [2, 0, 1, 3]
    assert by_area(BLOCKS) == [2, 0, 1, 3]
    assert by_start(BLOCKS) == [0, 1, 3, 2]


def test_load_comes_before_size_and_start():
    blocks = blocks_of(buffers_of((9, 8, 9), (4, 2, 3), (4, 0, 3), (5, 1, 3)))
    assert by_load(blocks) == [3, 2, 1, 0]


def test_loads_are_those_of_a_plain_count():
    for count in (1, 2, 40):
        blocks = blocks_of(random_buffers(random.Random(count), count))
        expected = [
            max(
                sum(other.size for other in blocks if other.first <= time <= other.last)
                for time in range(block.first, block.last + 1)
            )
            for block in blocks
        ]
        assert busiest_loads(blocks) == expected
    assert busiest_loads([]) == []
