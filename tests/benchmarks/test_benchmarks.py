"""Every benchmark runs on tiny shapes and ends with one JSON object. Nothing is timed here."""

import json
import logging
import runpy
import sys
from pathlib import Path

import bench_network
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
MARKS = {
    "bench_allocation_time": pytest.mark.slow,  # searches again and again
    "bench_bits": pytest.mark.thorough,  # multiplies by every instruction
    "bench_decode": pytest.mark.thorough,  # makes models and searches with them
    "bench_language": pytest.mark.thorough,  # imports transformers
    "bench_local_updates": pytest.mark.slow,  # starts processes that import transformers
    "bench_gradients_wire": pytest.mark.thorough,  # starts processes
    "bench_memory": pytest.mark.thorough,  # trains a model in several ways
    "bench_gpu_step": pytest.mark.slow,  # test_gpu_round.py runs it
    "bench_models": pytest.mark.slow,  # test_bench_models.py runs all sides but torch.compile
    "bench_numbers": pytest.mark.slow,  # trains two models, for two minutes
    "bench_network": pytest.mark.slow,  # starts processes on pretended machines, again and again
    "bench_start": pytest.mark.slow,  # starts processes that import PyTorch
    "bench_operations": pytest.mark.thorough,  # makes all operations of a step
    "bench_planned_memory": pytest.mark.slow,  # starts processes that import transformers
    "bench_training_bytes": pytest.mark.slow,  # starts processes that import PyTorch
    "bench_stored": pytest.mark.thorough,  # stores weights in every format
    "bench_step": pytest.mark.slow,  # test_transformer.py runs every side
}
QUICK = [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES]


@pytest.fixture
def settings():
    """Threads and logging as they were, whatever a benchmark makes of them."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("name", QUICK)
def test_quick_run(name, tmp_path, monkeypatch, capsys, settings):
    if name == "bench_network" and bench_network.obstacle() is not None:
        pytest.skip(f"no pretended network: {bench_network.obstacle()}")
    if name == "bench_graphs":
        pytest.importorskip("torch_geometric")
        pytest.importorskip("pymetis")
    written = tmp_path / "figures.json"
    script = str(BENCHMARKS / f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--threads", "1", "--json", str(written)])
    # Threads that spin while they wait would take the cores from tests that run beside this one.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code
    last = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
    assert written.read_text() == last + "\n"
    figures = json.loads(last)
    assert figures["benchmark"] == name.removeprefix("bench_")
    conditions = figures["conditions"]
    assert conditions["threads"] == 1 and conditions["quick"]
    assert {"device", "processor", "instructions", "versions", "baseline"} <= set(conditions)
    assert {"lsq", "python", "torch"} <= set(conditions["versions"])
    assert figures["rows"]
    assert all(row["ratio"] > 0 for row in figures["rows"] if row["ratio"] is not None)


def test_there_are_benchmarks():
    assert {"bench_linear", "bench_step"} <= set(NAMES)


def test_bad_option_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_linear.py", "--threads", "0"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / "bench_linear.py"), run_name="__main__")
    printed = capsys.readouterr().err
    assert end.value.code == 2
    assert "--threads" in printed and "'0'" in printed
