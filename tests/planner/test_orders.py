from lsq.planner.buffer import blocks_of
from lsq.planner.orders import by_area, by_load, by_size, by_start
from tests.planner.instances import buffers_of

BLOCKS = blocks_of(buffers_of((6, 0, 1), (5, 1, 2), (7, 4, 5), (3, 2, 4)))
"""Loads over time: 6, 11, 8, 3, 10, 7."""


def test_orders():
    assert by_load(BLOCKS) == [0, 1, 2, 3]
    assert by_size(BLOCKS) == [2, 0, 1, 3]
    assert by_area(BLOCKS) == [2, 0, 1, 3]
    assert by_start(BLOCKS) == [0, 1, 3, 2]
