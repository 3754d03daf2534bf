"""JSON into checked dataclasses: places in messages, nesting, checks of values, and the files that
are written."""

from dataclasses import dataclass

import pytest

from lsq.files import json_file
from lsq.files.json_file import check_choice, check_number, check_text, check_whole, shown


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
        content["points"],
        "points",
        lambda value, place: json_file.record(Point, value, place, y=doubled),
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
        (
            '{"points": [{"x": 1, "y": 2}, {"x": -1, "y": 2}]}',
            r"points\[1\].x is -1; it must be 0 or more",
        ),
        ('{"points": [{"x": 1, "y": 13}]}', r"points\[0\].y is 13; it must be another number"),
        ('{"points": [{"x": 1}]}', r"points\[0\] has no field 'y'; needed: x, y"),
        (
            '{"points": [{"x": 1, "y": 2, "z": 3}]}',
            r"points\[0\] has the unknown field 'z'; allowed: x, y",
        ),
    ],
)
def test_places(tmp_path, text, message):
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"points.json: {message} \(throw it away\)$"):
        json_file.read(path, points, "throw it away")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"this is not JSON \(line 1, column 1"),
        ("\ufeff{}", "this is not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": 0.' + "1" * 5000 + "}", "the content has the unknown field 'a'"),
        ('{"a":' * 100_000, "objects and lists stand too deep"),
    ],
    ids=lambda text: text[:20],
)
def test_no_json(tmp_path, text, message):
    path = tmp_path / "points.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        json_file.read(path, points, "remedy")


@pytest.mark.parametrize("depth", [8, 50, 100_000])
def test_depth(tmp_path, depth):
    path = tmp_path / "deep.json"
    path.write_text("[" * depth + "]" * depth)
    message = "objects and lists stand too deep" if depth > 50 else "the content is a list"
    with pytest.raises(ValueError, match=message):
        json_file.read(path, points, "remedy")


@dataclass(frozen=True, kw_only=True)
class Labelled(Point):
    label: str = "none"


def test_fields_with_a_default_may_be_missing():
    assert json_file.record(Labelled, {"x": 1, "y": 2}, "") == Labelled(x=1, y=2)
    assert json_file.record(Labelled, {"x": 1, "y": 2, "label": "a"}, "").label == "a"
    with pytest.raises(
        ValueError, match="the content has the unknown field 'name'; allowed: x, y, label"
    ):
        json_file.record(Labelled, {"x": 1, "y": 2, "name": "a"}, "")


def test_write(tmp_path):
    path = tmp_path / "made" / "points.json"
    json_file.write(path, {"a": 1}, "points", [{"x": 1, "y": 2}, {"x": 3, "y": 4}])
    lines = '  {"x": 1, "y": 2},\n  {"x": 3, "y": 4}'
    assert path.read_text() == '{\n "a": 1,\n "points": [\n' + lines + "\n ]\n}\n"
    json_file.write(path, {"a": 1}, "points", [])
    assert path.read_text() == '{\n "a": 1,\n "points": []\n}\n'
    with pytest.raises(ValueError):
        json_file.write(path, {"a": float("nan")}, "points", [])


WHOLE = "it must be a whole number from 1 to 9"
NUMBER = "it must be a finite number from 0 to 9"
TEXT = "it must be a printable text of 1 to 200 characters"


@pytest.mark.parametrize(
    ("check", "sound", "wrong", "message"),
    [
        (
            lambda value: check_whole("x", value, 1, 9),
            [1, 5, 9],
            [0, 10, 1.0, True, None, "1", [1]],
            f"; {WHOLE}",
        ),
        (
            lambda value: check_number("x", value, 9),
            [0, 0.5, 9, 9.0],
            [-1, 9.5, float("nan"), float("inf"), False, None, "1", 10**400],
            f"; {NUMBER}",
        ),
        (
            lambda value: check_text("x", value),
            ["x" * 200],
            ["", "a\n", "\x00", "\ud800", "x" * 201, None, 5, b"x"],
            f"; {TEXT}",
        ),
        (
            lambda value: check_choice("x", value, ("a", "b")),
            ["a"],
            ["c", "", None, 5, [], {}],
            "; allowed: 'a', 'b'",
        ),
    ],
)
def test_checks(check, sound, wrong, message):
    for value in sound:
        check(value)
    for value in wrong:
        with pytest.raises(ValueError, match=f"^x is .*{message}$"):
            check(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (None, "None"),
        ("ü\ud800", r"'\xfc\ud800'"),
        ([1], "a list"),
        ("x" * 99, "'" + "x" * 56 + "..."),
    ],
)
def test_shown(value, text):
    assert shown(value) == text
