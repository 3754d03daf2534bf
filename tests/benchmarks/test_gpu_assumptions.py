"""Each number of the model says where it is from."""

from dataclasses import fields

import gpu_assumptions
import pytest
from gpu_model import GPUS, H100, Gpu, variant


def test_every_number_has_a_source():
    rows = gpu_assumptions.rows()
    assert all(row["source"] for row in rows)
    wanted = {field.name for field in fields(Gpu)} - {"name", "target"}
    assert {row["number"] for row in rows} == wanted | set(gpu_assumptions.OTHERS)
    assert wanted == set(gpu_assumptions.FIELDS), "a field is gone"


def test_numbers_that_differ_by_luck_are_assumed_or_lie_between_measurements():
    for field in set(gpu_assumptions.FIELDS) - {"l2"}:
        if any(getattr(variant(gpu, 1.0), field) != getattr(gpu, field) for gpu in GPUS):
            assert gpu_assumptions.ASSUMED in gpu_assumptions.FIELDS[field][0], field


@pytest.mark.parametrize(
    ("name", "unit", "text"),
    [
        ("memory", 1e12, "3.35"),
        ("int8_reached", 1, "0.65 (0.53 to 0.77)"),
        ("gap", 1e-6, "2.5 (5 to 1.25)"),
        ("limits", 1, "warps 64, blocks 32, shared 233472, registers 65536"),
    ],
)
def test_numbers_as_they_are_shown(name, unit, text):
    assert gpu_assumptions.shown(H100, name, unit) == text


def test_the_table_is_markdown():
    head, rule, *lines = gpu_assumptions.markdown().splitlines()
    assert head.startswith("| number | A100 80 GB | RTX 4090 | H100 SXM | source |")
    assert {line.count("|") for line in (head, rule, *lines)} == {6}
