from lsq.planner.buffer import Buffer, Plan
from lsq.planner.planner import plan
from tests.planner.instances import buffers_of


def test_lower_bound():
    def bound(buffers):
        return plan(buffers).lower_bound

    assert bound([]) == 0
    assert bound(buffers_of((10, 0, 2), (5, 2, 3), (7, 3, 3))) == 15
    other = Buffer(name="y", size=6, first=5, last=5, pool="other")
    assert bound([*buffers_of((10, 0, 2)), other]) == 16


def test_peak_and_gap():
    values = {
        "offsets": {},
        "segments": {},
        "capacities": (20, 20),
        "pools": ("a", "a"),
        "method": "",
        "seconds": 0.0,
    }
    plan = Plan(**values, used=(11, 4), lower_bound=12)
    assert plan.peak == 15 and plan.gap == 0.25
    assert Plan(**values, used=(0, 0), lower_bound=0).gap == 0.0
