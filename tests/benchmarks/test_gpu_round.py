"""The round on a GPU, in the emulator: what fails, hangs or faults is named, and what was found is
kept."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def round_of(
    *options: str, out: Path, seconds: float, python: str = sys.executable
) -> subprocess.CompletedProcess:
    """A round that has ended."""
    command = ["benchmarks/gpu_round.sh", "--python", python, *options]
    environment = {**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1"}
    given = {"cwd": BENCHMARKS.parent, "env": environment, "timeout": seconds}
    return subprocess.run(command, capture_output=True, text=True, **given)


def verdicts(done: subprocess.CompletedProcess) -> dict[str, str]:
    """Stage -> what the last lines of a round say of it."""
    return dict(re.findall(r"^(\w+) +(\S.*?) +\d+ s$", done.stdout, re.MULTILINE))


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_rehearsal_names_what_is_planted(tmp_path):
    done = round_of("--rehearse", "probe", "tests", out=tmp_path, seconds=390)
    assert done.returncode == 1 and verdicts(done) == {"probe": "FAILED", "tests": "FAILED"}, (
        done.stdout
    )
    rows = json.loads((tmp_path / "probe.json").read_text())["rows"]
    found = {row["kernel"]: row for row in rows}
    assert (found["lsq_gated"]["state"], found["lsq_rotate"]["state"]) == ("wrong", "fault")
    assert "its process ended with status -11" in found["lsq_rotate"]["why"]
    assert found["lsq_append"]["state"] == "hangs"
    assert "no word for 20 seconds" in found["lsq_append"]["why"]
    assert found["lsq_start_scales"]["state"] == "ok", "other kernels run after those that fault"
    for text in (
        r"failed: \S*test_wrong: AssertionError: codes differ",
        r"lost the GPU: \S*test_faults: RuntimeError: "
        r"lsq_rotate cannot be launched: CUDA error: an illegal",
        r"failed: \S*: worker .* crashed .*::test_hangs",
        r"1 passed",
        r"^lsq_rotate +fault",
    ):
        assert re.search(text, done.stdout, re.MULTILINE), (text, done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "probe.json", "results.md"}


@pytest.mark.thorough
def test_a_round_in_the_emulator_keeps_its_log(tmp_path):
    done = round_of("--device", "emulator", "sanitizer", "tests", out=tmp_path, seconds=110)
    assert done.returncode == 0, done.stdout
    assert "log.txt" in {path.name for path in tmp_path.iterdir()}
    assert verdicts(done) == {"sanitizer": "not run", "tests": "ok"}
    (seconds,) = re.findall(r"== tests, at most (\d+) seconds", done.stdout)
    assert 400 < int(seconds) < 600, "the last stage may take what the others have left"


def test_a_stage_of_the_round_that_fails_does_not_stop_the_others(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    libraries = sorted((BENCHMARKS.parent / "lsq" / "native").glob("*.so"))
    done = round_of("--device", "emulator", out=tmp_path / "out", seconds=60, python=str(broken))
    assert done.returncode == 1 and "the libraries cannot be built" in done.stdout
    stages = "probe", "step", "tests", "smoke"
    wanted = dict.fromkeys(stages, "FAILED") | {"products": "not run"}
    assert verdicts(done) == wanted
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["log.txt"]
    assert all(path.exists() for path in libraries), (
        "libraries of a checkout are not the round's to remove"
    )


def test_a_round_without_a_gpu_says_so_and_writes_nothing(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = round_of(out=tmp_path / "out", seconds=60, python=str(python))
    assert done.returncode == 2 and not done.stdout
    assert "no PyTorch that sees a GPU, so nothing was run" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_round_explains_itself():
    command = [str(BENCHMARKS / "gpu_round.sh"), "everything"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Stages" in done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("*.sh")))
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", str(BENCHMARKS / script)], check=True)
