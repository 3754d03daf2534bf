"""Checks take what they say, and name what they do not take."""

import pytest

from lsq.gemm.checks import check_choice, check_number, check_text, check_whole, shown


@pytest.mark.parametrize("value", [1, 5, 9])
def test_whole(value):
    check_whole("x", value, 1, 9)


@pytest.mark.parametrize("value", [0, 10, 1.0, True, None, "1", [1]])
def test_not_whole(value):
    with pytest.raises(ValueError, match="^x is .*; it must be a whole number from 1 to 9$"):
        check_whole("x", value, 1, 9)


@pytest.mark.parametrize("value", [0, 0.5, 9, 9.0])
def test_number(value):
    check_number("x", value, 9)


@pytest.mark.parametrize("value", [-1, 9.5, float("nan"), float("inf"), False, None, "1", 10**400])
def test_not_a_number(value):
    with pytest.raises(ValueError, match="^x is .*; it must be a finite number from 0 to 9$"):
        check_number("x", value, 9)


@pytest.mark.parametrize("value", ["", "a\n", "\x00", "\ud800", "x" * 201, None, 5, b"x"])
def test_not_text(value):
    check_text("x", "x" * 200)
    with pytest.raises(ValueError, match="^x is .*; it must be a printable text of 1 to 200 characters$"):
        check_text("x", value)


@pytest.mark.parametrize("value", ["c", "", None, 5, [], {}])
def test_not_a_choice(value):
    check_choice("x", "a", ("a", "b"))
    with pytest.raises(ValueError, match="^x is .*; allowed: 'a', 'b'$"):
        check_choice("x", value, ("a", "b"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(5, "5"), (None, "None"), ("ü\ud800", r"'\xfc\ud800'"), ([1], "a list"), ("x" * 99, "'" + "x" * 56 + "...")],
)
def test_shown(value, text):
    assert shown(value) == text
