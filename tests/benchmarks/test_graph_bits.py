"""Bits of nodes by degree: which mixes a side may take, and that tasks run."""

import json

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("pymetis")
pytest.importorskip("sklearn")
import graph_bits  # noqa: E402
from graph_bits import ALIKE, BEST, HIGH, LOW, TASKS, fits  # noqa: E402


def test_sides_take_mixes_that_rise_or_fall():
    for mix, sides in (
        ((4, 3, 3, 2), {LOW, BEST}),
        ((2, 2, 4, 4), {HIGH, BEST}),
        ((3, 3, 3, 3), {ALIKE, BEST}),
        ((2, 4, 2, 4), {BEST}),
    ):
        assert {side for side in (LOW, HIGH, ALIKE, BEST) if fits(mix, side)} == sides


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "tasks", [["karate, GCN"], pytest.param(list(TASKS), marks=pytest.mark.slow)]
)
def test_quick_run(tasks, tmp_path, capsys):
    path = tmp_path / "found.json"
    given = ["--quick", "--threads", "1", "--json", str(path), "--seeds", "1", "2"]
    graph_bits.main([*given, "--means", "3", "--tasks", *tasks])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(path.read_text()) == found
    rows = [row for row in found["rows"] if row["task"] == tasks[0]]
    sides = {row["side"]: row for row in rows}
    assert sides[ALIKE]["bits"] == 3 and sides[LOW]["divergence_difference"] == 0
    # validated on the nodes of the test
    assert sides[BEST]["divergence"] == min(row["divergence"] for row in rows)
    assert all(row["divergence_error"] is not None for row in rows)
