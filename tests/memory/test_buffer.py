import pytest

from lsq.memory.buffer import Buffer, Plan, live_load
from lsq.memory.planner import plan
from tests.memory.instances import buffers_of


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


def test_live_load_and_lower_bound():
    buffers = buffers_of((10, 0, 2), (5, 2, 3), (7, 3, 3))
    assert live_load(buffers) == [(0, 10), (2, 15), (3, 12), (4, 0)]
    assert plan([]).lower_bound == 0 and plan(buffers).lower_bound == 15
    placed = Buffer(name="y", size=6, first=5, last=5, offset=256)
    assert plan([*buffers, placed]).lower_bound == 262


def test_peak_and_gap():
    empty = {"offsets": {}, "segments": {}, "method": "", "seconds": 0.0}
    made = Plan(**empty, used=(11, 4), capacities=(20, 20), lower_bound=12)
    assert made.peak == 15 and made.gap == 0.25
    assert Plan(**empty, used=(0, 0), capacities=(0, 0), lower_bound=0).gap == 0.0
