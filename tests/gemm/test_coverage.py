"""The report of what was tuned: shares, text, and the JSON that the tuner reads."""

import dataclasses
import json

import pytest

from lsq.gemm import coverage
from lsq.gemm.coverage import Coverage, Line
from tests.gemm.tuned import key


def line(m, hit, calls=1, seconds=0.0, nearest=None):
    return Line(key=key(m), hit=hit, calls=calls, seconds=seconds, nearest=nearest)


def report(*lines, files=("/a.json",)):
    return Coverage(kind="cpu", device="Example CPU", files=files, lines=lines)


MIXED = report(line(8, False, 1, 0.25, key(16)), line(16, True, 3, 0.5, key(16)), line(32, False, 1, 0.25))


def test_shares():
    assert MIXED.share("calls") == pytest.approx(0.6)
    assert MIXED.share("seconds") == pytest.approx(0.5)
    assert MIXED.share("operations") == pytest.approx(3 * 16 / (8 + 3 * 16 + 32))
    assert report(line(8, True)).share("seconds") is None
    assert report().share("calls") is None


def test_those_that_take_longest_come_first():
    assert [each.key.m for each in MIXED.lines] == [16, 32, 8]
    assert [each.key.m for each in MIXED.missed] == [32, 8]


def test_text():
    assert MIXED.text().splitlines() == [
        "tuned products on Example CPU: 60.0% of calls, 54.5% of operations, 50.0% of time (5 calls of 3 products)",
        "  from /a.json",
        "  missed linear_int8 32 x 128 x 256 (int8 to int8, nt, alpha vector): 1 calls, 0.250 s; "
        "none for any number of tokens",
        "  missed linear_int8 8 x 128 x 256 (int8 to int8, nt, alpha vector): 1 calls, 0.250 s; nearest: 16 tokens",
    ]
    assert report(line(8, True), files=()).text().splitlines() == [
        "tuned products on Example CPU: 100.0% of calls, 100.0% of operations (1 calls of 1 products)",
        "  there is no file for this device",
    ]
    assert report().text() == "tuned products on Example CPU: none was asked for"


def test_long_lists_are_cut():
    assert report(*(line(m, False) for m in range(1, 31))).text().splitlines()[-1] == "  and 20 more"


@pytest.mark.parametrize("wanted", [MIXED, report(), report(files=())])
def test_round_trip(tmp_path, wanted):
    path = tmp_path / "report.json"
    coverage.write(path, wanted)
    assert coverage.read(path) == wanted


@pytest.mark.parametrize(
    ("places", "value", "message"),
    [
        (["format"], 2, "format is 2; this version of lsq reads format 1"),
        (["kind"], "tpu", "kind is 'tpu'; allowed: 'cpu', 'cuda'"),
        (["device"], "", "device is ''; it must be a printable text"),
        (["files"], "x", "files is 'x'; it must be a list"),
        (["files", 0], 5, r"files\[0\] is 5; it must be a path"),
        (["lines"], None, "lines is None; it must be a list"),
        (["lines", 1, "hit"], 1, r"lines\[1\].hit is 1; it must be true or false"),
        (["lines", 1, "calls"], -1, r"lines\[1\].calls is -1; it must be a whole number"),
        (["lines", 1, "seconds"], "1", r"lines\[1\].seconds is '1'; it must be a finite number"),
        (["lines", 1, "key", "m"], 0, r"lines\[1\].key.m is 0; it must be a whole number"),
        (["lines", 0, "nearest", "op"], "?", r"lines\[0\].nearest.op is '\?'; allowed"),
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
    with pytest.raises(ValueError, match="the content is a list; it must be an object with format, kind, device"):
        coverage.read(path)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MIXED.kind = "cuda"
