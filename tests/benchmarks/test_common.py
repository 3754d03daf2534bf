"""Alternation, medians and the table, without a clock."""

import common
import pytest


def test_sides_take_turns(monkeypatch):
    order = []
    clock = iter(range(1000))
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    sides = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timings = common.alternate(sides, rounds=3, warm_up=1)
    assert order == ["a", "b"] * 4
    assert timings["a"] == common.Timing(median=1, fastest=1)


def test_quick_sides_are_repeated(monkeypatch):
    def fake(run, repeats=1, synchronize=None, clock=None):
        run(repeats)
        return common.MINIMUM_SECONDS / 10

    monkeypatch.setattr(common, "seconds", fake)
    repeats = []
    common.alternate({"a": repeats.append}, rounds=2, warm_up=2)
    assert repeats == [1, 1, 10, 10]


def test_help_has_the_whole_first_paragraph():
    assert common.parser("One\nsentence.\n\nMore.\n").description == "One\nsentence."


def test_timing():
    assert common.timing([3.0, 1.0, 10.0]) == common.Timing(median=3.0, fastest=1.0)


def test_table():
    rows = [{"side": "float32", "seconds": 12.34567}, {"side": "lsq", "seconds": None}]
    assert common.table(rows).splitlines() == [
        "side     seconds",
        "-------  -------",
        "float32    12.35",
        "lsq            -",
    ]


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_positive_refuses(text):
    with pytest.raises(ValueError):
        common.positive(text)
