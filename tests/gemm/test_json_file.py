"""JSON into checked dataclasses: places in messages, nesting, and the files that are written."""

from dataclasses import dataclass

import pytest

from lsq.gemm import json_file


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    y: int

    def __post_init__(self):
        if self.x < 0:
            raise ValueError(f"x is {self.x}; it must be 0 or more")


def points(content):
    """Points from {"points": [...]}."""
    json_file.check_fields(content, ["points"], "")
    return json_file.sequence(
        content["points"], "points", lambda value, place: json_file.record(Point, value, place, y=doubled)
    )


def doubled(value, place):
    if value == 13:
        raise ValueError(f"{place} is 13; it must be another number")
    return 2 * value


def test_read(tmp_path):
    path = tmp_path / "points.json"
    path.write_text('{"points": [{"x": 1, "y": 2}]}')
    assert json_file.read(path, points, "remedy") == (Point(x=1, y=4),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"points": 5}', "points is 5; it must be a list"),
        ('{"points": [5]}', r"points\[0\] is 5; it must be an object with x, y"),
        ('{"points": [{"x": 1, "y": 2}, {"x": -1, "y": 2}]}', r"points\[1\].x is -1; it must be 0 or more"),
        ('{"points": [{"x": 1, "y": 13}]}', r"points\[0\].y is 13; it must be another number"),
        ('{"points": [{"x": 1}]}', r"points\[0\] has no field 'y'; needed: x, y"),
        ('{"points": [{"x": 1, "y": 2, "z": 3}]}', r"points\[0\] has the unknown field 'z'; allowed: x, y"),
    ],
)
def test_places(tmp_path, text, message):
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"points.json: {message} \(throw it away\)$"):
        json_file.read(path, points, "throw it away")


@pytest.mark.parametrize("depth", [8, 9, 50, 100_000])
def test_depth_is_judged_before_content(tmp_path, depth):
    path = tmp_path / "deep.json"
    path.write_text("[" * depth + "]" * depth)
    message = "the content is a list" if depth == 8 else "objects and lists stand more than 8 deep"
    with pytest.raises(ValueError, match=message):
        json_file.read(path, points, "remedy")


def test_write(tmp_path):
    path = tmp_path / "made" / "points.json"
    json_file.write(path, {"a": 1}, "points", [{"x": 1, "y": 2}, {"x": 3, "y": 4}])
    assert path.read_text() == '{\n "a": 1,\n "points": [\n  {"x": 1, "y": 2},\n  {"x": 3, "y": 4}\n ]\n}\n'
    json_file.write(path, {"a": 1}, "points", [])
    assert path.read_text() == '{\n "a": 1,\n "points": []\n}\n'
    with pytest.raises(ValueError):
        json_file.write(path, {"a": float("nan")}, "points", [])
