"""Trainings of graph networks: how they are compared, and that each task and side runs."""

import json

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("pymetis")
pytest.importorskip("sklearn")
import graph_quality  # noqa: E402
from graph_quality import FLOAT, SIDES, TASKS, Trained, rows  # noqa: E402


def test_differences_are_paired_by_seed():
    def trained(*right):
        return [Trained(right=one, processor_seconds=2.0) for one in right]

    first, second = rows("task", {FLOAT: trained(50.0, 60.0), "8 bits": trained(51.0, 63.0)})
    assert first["difference"] == 0 and first["mean"] == 55
    assert second["difference"] == 2 and second["error"] == pytest.approx(1.0)
    (alone,) = rows("task", {FLOAT: trained(50.0)})
    assert alone["spread"] is alone["error"] is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("tasks", "sides", "options"),
    [
        (["GIN, small graphs", "karate, GCN"], [FLOAT, "8 bits"], []),
        (["GCN, 16 wide"], [FLOAT, "8 bits"], ["--together"]),
        pytest.param(list(TASKS), list(SIDES), [], marks=pytest.mark.thorough),
    ],
)
def test_quick_run(tasks, sides, options, tmp_path, capsys):
    path = tmp_path / "found.json"
    given = ["--quick", "--threads", "1", "--json", str(path), "--seeds", "1", *options]
    graph_quality.main([*given, "--tasks", *tasks, "--sides", *sides])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(path.read_text()) == found
    assert found["conditions"]["together"] is bool(options)
    assert [(row["task"], row["side"]) for row in found["rows"]] == [
        (task, side) for task in tasks for side in sides
    ]
    assert all(0 <= row["mean"] <= 100 for row in found["rows"])
