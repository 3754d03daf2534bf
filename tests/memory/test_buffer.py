import pytest

from lsq.memory.buffer import Buffer, Plan, live_load


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": -1}, "'x': size is -1; it must be a whole number from 0 to"),
        ({"size": 2**62 + 1}, "size is 4611686018427387905"),
        ({"size": 1.5}, "size is 1.5"),
        ({"first": 3, "last": 2}, "lives from 3 to 2"),
        ({"alignment": 0}, "alignment is 0"),
        ({"alignment": 24}, "alignment is 24; it must be a power of two"),
    ],
)
def test_wrong_buffers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Buffer(**{"name": "x", "size": 1, "first": 0, "last": 3, **change})


def test_live_load():
    sizes = (10, 0, 2), (5, 2, 3), (7, 3, 3)
    buffers = [
        Buffer(name=str(size), size=size, first=first, last=last) for size, first, last in sizes
    ]
    assert live_load(buffers) == [(0, 10), (2, 15), (3, 12), (4, 0)]


def test_gap():
    assert Plan(offsets={}, peak=15, lower_bound=12, seconds=0.0).gap == 0.25
    assert Plan(offsets={}, peak=0, lower_bound=0, seconds=0.0).gap == 0.0
