import pytest

from lsq.planner.buffer import Buffer, Plan, blocks_of
from lsq.planner.planner import plan
from tests.planner.instances import buffers_of


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": -1}, "'x': size is -1"),
        ({"alias": "x"}, "alias of itself"),
        ({"offset": -8}, "offset is -8"),
    ],
)
def test_wrong_buffers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Buffer(**{"name": "x", "size": 1, "first": 0, "last": 3, **change})


def test_blocks_join_aliases():
    buffers = [
        Buffer(name="a", size=10, first=0, last=2, alignment=8),
        Buffer(name="b", size=5, first=1, last=1),
        Buffer(name="c", size=7, first=2, last=4, alignment=64, alias="a"),
        Buffer(name="d", size=12, first=4, last=5, alignment=8, alias="c", offset=128),
    ]
    joined, single = blocks_of(buffers)
    assert joined.names == ("a", "c", "d") and (joined.size, joined.first, joined.last) == (12, 0, 5)
    assert (joined.alignment, joined.offset) == (64, 128)
    assert single.names == ("b",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{}, {}], "two buffers are called 'x'"),
        ([{"alias": "y"}], "alias of 'y', which is not a buffer"),
        ([{"alias": "y"}, {"name": "y", "pool": "p"}], "x, y are in the pools default, p"),
        ([{"alias": "y", "offset": 0}, {"name": "y", "offset": 8}], r"fixed offsets \[0, 8\]"),
        ([{"alias": "y", "offset": 8}, {"name": "y", "alignment": 16}], "8 is no multiple of alignment 16"),
    ],
)
def test_contradictions_are_refused(changes, message):
    values = {"name": "x", "size": 1, "first": 0, "last": 3, "alignment": 8}
    buffers = [Buffer(**{**values, **change}) for change in changes]
    with pytest.raises(ValueError, match=message):
        blocks_of(buffers)


def test_lower_bound():
    def bound(buffers):
        return plan(buffers).lower_bound

    assert bound([]) == 0
    assert bound(buffers_of((10, 0, 2), (5, 2, 3), (7, 3, 3))) == 15
    fixed = Buffer(name="x", size=4, first=9, last=9, alignment=1, offset=30)
    assert bound([*buffers_of((10, 0, 2)), fixed]) == 34
    other = Buffer(name="y", size=6, first=5, last=5, pool="other")
    assert bound([*buffers_of((10, 0, 2)), other]) == 16


def test_peak_and_gap():
    values = {"offsets": {}, "segments": {}, "capacities": (20, 20), "pools": ("a", "a"), "method": "", "seconds": 0.0}
    plan = Plan(**values, used=(11, 4), lower_bound=12)
    assert plan.peak == 15 and plan.gap == 0.25
    assert Plan(**values, used=(0, 0), lower_bound=0).gap == 0.0
