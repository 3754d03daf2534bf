"""The report of what was tuned: shares, text, and the JSON that the tuner reads."""

import dataclasses
import json

import pytest

from lsq.tune import coverage
from lsq.tune.coverage import Coverage, Line
from tests.gemm.tuned import key


def line(m, served=None, calls=1, seconds=0.0):
    """One product, served by the entry for so many tokens."""
    return Line(key=key(m), calls=calls, seconds=seconds, served=None if served is None else key(served))


def report(*lines, files=("/a.json",)):
    return Coverage(kind="cpu", device="Example CPU", files=files, lines=lines)


MIXED = report(line(8, 16, 1, 0.25), line(16, 16, 3, 0.5), line(32, None, 1, 0.25))


def test_shares():
    assert MIXED.shares("calls") == pytest.approx((0.6, 0.2))
    assert MIXED.shares("seconds") == pytest.approx((0.5, 0.25))
    total = 8 + 3 * 16 + 32
    assert MIXED.shares("operations") == pytest.approx((3 * 16 / total, 8 / total))
    assert report(line(8, 8)).shares("seconds") is None
    assert report().shares("calls") is None


def test_those_that_take_longest_come_first():
    assert [each.key.m for each in MIXED.lines] == [16, 32, 8]
    assert [each.key.m for each in MIXED.missed] == [32, 8]


def test_text():
    assert MIXED.text().splitlines() == [
        "tuned products on Example CPU: 5 calls of 3 products",
        "  calls: 60.0% tuned, 20.0% as the nearest batch size, 20.0% not",
        "  operations: 54.5% tuned, 9.1% as the nearest batch size, 36.4% not",
        "  time: 50.0% tuned, 25.0% as the nearest batch size, 25.0% not",
        "  from /a.json",
        "  missed project 32 x 128 x 256 (int8 to int32, nt): 1 calls, 0.250 s; ran untuned",
        "  missed project 8 x 128 x 256 (int8 to int32, nt): 1 calls, 0.250 s; ran as 16 tokens",
    ]
    assert report(line(8, 8), files=()).text().splitlines() == [
        "tuned products on Example CPU: 1 calls of 1 products",
        "  calls: 100.0% tuned, 0.0% as the nearest batch size, 0.0% not",
        "  operations: 100.0% tuned, 0.0% as the nearest batch size, 0.0% not",
        "  there is no file for this device",
    ]
    assert report().text() == "tuned products on Example CPU: none was asked for"


def test_long_lists_are_cut():
    assert report(*(line(m) for m in range(1, 31))).text().splitlines()[-1] == "  and 20 more"


@pytest.mark.parametrize("wanted", [MIXED, report(), report(files=())])
def test_round_trip(tmp_path, wanted):
    path = tmp_path / "report.json"
    coverage.write(path, wanted)
    assert coverage.read(path) == wanted


@pytest.mark.parametrize(
    ("places", "value", "message"),
    [
        (["format"], 1, "format is 1; this version of lsq reads format 2"),
        (["kind"], "tpu", "kind is 'tpu'; allowed: 'cpu', 'cuda'"),
        (["device"], "", "device is ''; it must be a printable text"),
        (["files"], "x", "files is 'x'; it must be a list"),
        (["files", 0], 5, r"files\[0\] is 5; it must be a path"),
        (["lines"], None, "lines is None; it must be a list"),
        (["lines", 1, "calls"], -1, r"lines\[1\].calls is -1; it must be a whole number"),
        (["lines", 1, "seconds"], "1", r"lines\[1\].seconds is '1'; it must be a finite number"),
        (["lines", 1, "key", "m"], 0, r"lines\[1\].key.m is 0; it must be a whole number"),
        (["lines", 0, "served", "op"], "?", r"lines\[0\].served.op is '\?'; allowed"),
        (["extra"], 1, "the content has the unknown field 'extra'"),
    ],
)
def test_damaged_reports(tmp_path, places, value, message):
    path = tmp_path / "report.json"
    coverage.write(path, MIXED)
    content = inner = json.loads(path.read_text())
    for place in places[:-1]:
        inner = inner[place]
    inner[places[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"report.json: {message}.*have a run write it again\)$"):
        coverage.read(path)


def test_not_a_report(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="the content is a list; it must be an object with kind, device"):
        coverage.read(path)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MIXED.kind = "cuda"
