"""Tables fit, whatever the terminal is; numbers stay whole."""

import pytest

from lsq.study.tables import fitted

HEAD = ("format", "bits", "SNR, dB", "least, dB", "to Gaussian's limit, dB", "largest error")
ROWS = [
    ("int4/group16/uint4", "4.50", "21.7", "21.1", "5.3", "6.67%"),
    ("nvfp4", "4.50", "20.4", "20.3", "6.7", "7.2%"),
]
SIDES = ("left", *("right",) * 5)


@pytest.mark.parametrize("style", ["simple", "plain", "github"])
@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_table_fits(width, style, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    made = fitted(ROWS, HEAD, SIDES, style=style)
    assert max(map(len, made.splitlines())) <= width
    words = made.replace("|", " ").split()
    assert {cell for row in ROWS for cell in row[1:]} <= set(words)
    assert {"format", "bits", "SNR,", "least,", "Gaussian's", "largest", "error"} <= set(words)


def test_a_table_that_fits_is_as_it_was():
    lines = fitted(ROWS, HEAD, SIDES, width=120).splitlines()
    assert len(lines) == 4 and lines[0].split("  ")[0] == "format"
    assert "to Gaussian's limit, dB" in lines[0]
    assert lines == fitted(ROWS, HEAD, SIDES, width=len(lines[0])).splitlines()


def test_each_part_begins_with_the_keys():
    cells = ("a", "1", "2" * 10, "3" * 10)
    made = fitted(
        [cells], ("x", "y", "z", "w"), ("left", *("right",) * 3), style="plain", keys=2, width=22
    )
    assert [part.split() for part in made.split("\n\n")] == [
        ["x", "y", "z", "a", "1", "2" * 10],
        ["x", "y", "w", "a", "1", "3" * 10],
    ]
