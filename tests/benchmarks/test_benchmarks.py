"""Every benchmark runs on tiny shapes and ends with one JSON object. Nothing is timed here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import network
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_quick_run(name, tmp_path):
    if name == "bench_network" and network.obstacle() is not None:
        pytest.skip(f"no pretended network: {network.obstacle()}")
    written = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--threads", "1", "--json", str(written)]
    # Threads that spin while they wait would take the cores from tests that run beside this one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr
    last = done.stdout.rstrip("\n").split("\n")[-1]
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


def test_bad_option_is_named():
    command = [sys.executable, str(BENCHMARKS / "bench_linear.py"), "--threads", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    assert "--threads" in done.stderr and "'0'" in done.stderr
