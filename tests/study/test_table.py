"""Figures as text and as JSON."""

import json
import math
from dataclasses import replace

from lsq.study.table import COLUMNS, Entry, Error, Errors


def entry(name: str, *noise: float, kind: str = "weight", **changes) -> Entry:
    errors = tuple(
        Error(format=form, bits=bits, signal_to_noise=value, largest=0.1)
        for (form, bits), value in zip((("int8/row", 8.5), ("int4/row", 4.5)), noise, strict=False)
    )
    given = {"shape": (4, 5), "values": 20, "problem": None, "zero_rows": 0, "errors": errors}
    return Entry(name=name, kind=kind, **{**given, **changes})


ERRORS = Errors(
    clip="mse",
    percentile=99.9,
    formats=("int8/row", "int4/row"),
    entries=(
        entry("a", 40.0, 20.0),
        entry("b", 42.0, 18.0),
        entry("c", math.inf, 19.0),
        entry("d", problem="it is odd"),
        entry("a", 30.0, 10.0, kind="gradient"),
    ),
)


def test_the_table():
    lines = str(ERRORS).splitlines()
    assert (
        lines[0] == "weights: medians of 3, clips by mse" and lines[2].split("  ")[0] == COLUMNS[0]
    )
    assert [line.split() for line in lines[4:6]] == [
        ["int4/row", "4.50", "19.0", "18.0", "8.1", "10.00%"],
        ["int8/row", "8.50", "42.0", "40.0", "9.2", "10.00%"],
    ]
    assert (
        lines[-1] == "not measured: weight d: it is odd"
        and "gradients: medians of 1, clips by mse" in lines
    )
    assert "| int4/row | 4.50 |" in " ".join(ERRORS.table("github").split()).replace("|   ", "| ")


def test_json_holds_everything():
    found = json.loads(json.dumps(ERRORS.to_json(), allow_nan=False))
    assert (
        found["schema"] == "lsq formats 1"
        and found["clip"] == "mse"
        and found["percentile"] is None
    )
    assert [one["name"] for one in found["tensors"]] == ["a", "b", "c", "d", "a"]
    assert found["tensors"][2]["errors"][0] == {
        "format": "int8/row",
        "bits": 8.5,
        "signal_to_noise": None,
        "largest_error": 0.1,
    }
    assert found["tensors"][3]["problem"] == "it is odd" and found["tensors"][3]["errors"] == []
    assert found["medians"]["weight"][0]["where"] == "b"
    assert list(found["medians"]) == ["weight", "gradient"]


def test_weights_without_a_product_are_named():
    entries = (
        entry("table", 1.0),
        entry("a", 1.0),
        entry("b", 1.0),
        entry("a", 1.0, kind="activation"),
        entry("b[4:]", 1.0, kind="activation"),
    )
    errors = Errors(
        clip="mse", percentile=1.0, formats=("int8/row",), entries=entries, of_model=True
    )
    assert errors.remarks() == ["no product was seen of: table"]
    assert replace(errors, of_model=False).remarks() == []


def test_nothing_measured():
    nothing = Errors(
        clip="kl", percentile=1.0, formats=("nvfp4",), entries=(entry("d", problem="it is odd"),)
    )
    assert nothing.kinds == () and nothing.medians("weight") == []
    assert (
        str(nothing) == "not measured: weight d: it is odd" and nothing.to_json()["medians"] == {}
    )
