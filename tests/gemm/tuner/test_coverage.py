"""What is said of what was tuned: shares, text, and the products that were missed."""

from pathlib import Path

import pytest

from lsq.gemm.configuration_file import Found
from lsq.gemm.lookup import Table
from lsq.gemm.tuner import coverage
from tests.gemm.tuned import CPU, entry, file, key


def table(*uses, tuned=()):
    """A table with entries for numbers of tokens, of which products (tokens, calls, seconds) were
    asked for."""
    found = [
        Found(path=Path("/a.json"), source="user", file=file(*map(entry, tuned)), refusal=None)
    ] * bool(tuned)
    made = Table(CPU, found)
    for tokens, calls, seconds in uses:
        for _ in range(calls):
            use = made.use(key(tokens))
        made.add_seconds(use, seconds)
    return made


MIXED = table((8, 1, 0.25), (16, 3, 0.5), tuned=[16])


def test_shares():
    assert coverage.shares(MIXED, "calls") == (0.75, 0.25)
    assert coverage.shares(MIXED, "time") == pytest.approx((2 / 3, 1 / 3))
    assert coverage.shares(MIXED, "arithmetic") == pytest.approx(
        (3 * 16 / (8 + 3 * 16), 8 / (8 + 3 * 16))
    )
    assert coverage.shares(table((8, 1, 0.5)), "calls") == (0, 0)
    assert coverage.shares(table((8, 1, 0.0)), "time") is None
    assert coverage.shares(table(), "calls") is None


def test_those_that_take_longest_come_first():
    assert coverage.missed(MIXED) == [key(8)]
    untuned = table((8, 1, 0.25), (16, 1, 0.5), (32, 1, 0.0), (64, 1, 0.0))
    assert coverage.missed(untuned) == [key(16), key(8), key(64), key(32)]


def test_text():
    assert coverage.text(MIXED).splitlines() == [
        "tuned products on Example CPU: 4 calls of 2 products",
        "  calls: 75.0% tuned, 25.0% as the nearest batch size, 0.0% not",
        "  arithmetic: 85.7% tuned, 14.3% as the nearest batch size, 0.0% not",
        "  time: 66.7% tuned, 33.3% as the nearest batch size, 0.0% not",
        "  from /a.json",
        "  missed project 8 x 128 x 256 (int8 to int32, nt): 1 calls, 0.250 s; ran as 16 tokens",
    ]
    assert coverage.text(table((8, 1, 0.0))) == (
        "tuned products on Example CPU: none, for there is no file for this device; lsq tune makes"
        " one"
    )
    assert coverage.text(table()) == "tuned products on Example CPU: none was asked for"


def test_long_lists_are_cut():
    assert (
        coverage.text(table(*((m, 1, 0.0) for m in range(1, 31)), tuned=[64])).splitlines()[-1]
        == "  and 20 more"
    )
