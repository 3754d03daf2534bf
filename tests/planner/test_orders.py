from lsq.planner.orders import by_area, by_load, by_size, by_start
from tests.planner.instances import buffers_of

BUFFERS = buffers_of((6, 0, 1), (5, 1, 2), (7, 4, 5), (3, 2, 4))
"""Loads over time: 6, 11, 8, 3, 10, 7."""


def test_orders():
    assert by_load(BUFFERS) == [0, 1, 2, 3]
    assert by_size(BUFFERS) == [2, 0, 1, 3]
    assert by_area(BUFFERS) == [2, 0, 1, 3]
    assert by_start(BUFFERS) == [0, 1, 3, 2]
