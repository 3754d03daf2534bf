"""The round on a GPU, in the emulator: what fails, hangs or faults is named, and what was found is
kept."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
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
    broken = program(tmp_path, "exit 3")
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


def program(folder: Path, commands: str) -> Path:
    """One that stands in for Python."""
    found = folder / "python"
    found.write_text(f"#!/bin/bash\n{commands}\n")
    found.chmod(0o755)
    return found


def test_a_round_without_a_gpu_says_so_and_writes_nothing(tmp_path):
    done = round_of(out=tmp_path / "out", seconds=60, python=str(program(tmp_path, "exit 1")))
    assert done.returncode == 2 and not done.stdout
    assert "no PyTorch that sees a GPU, so nothing was run" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_round_that_is_stopped_ends_its_stage_and_keeps_what_was_found(number, tmp_path):
    out, started = tmp_path / "out", tmp_path / "started"
    out.mkdir()
    out.joinpath("results.md").write_text("of a round before")
    python = program(
        tmp_path,
        f"""case $* in
    *bench_gpu_step*) echo '{{}}' > {shlex.quote(str(out / "step.json"))}
        touch {shlex.quote(str(out / "step.partial"))}
        echo $$ > {shlex.quote(str(started))}; while true; do sleep 0.1; done ;;
    *gpu.py*) cp "$2" "$4" ;;
esac""",
    )
    command = ["benchmarks/gpu_round.sh", "--device", "emulator", "--python", str(python)]
    round_ = subprocess.Popen(
        [*command, "step", "smoke"],
        cwd=BENCHMARKS.parent,
        env={**os.environ, "OUT": str(out)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not started.exists() or not started.read_text():
        assert round_.poll() is None
        time.sleep(0.05)
    os.killpg(round_.pid, number)
    text, _ = round_.communicate(timeout=60)
    assert round_.returncode == 1 and out.joinpath("log.txt").read_text() == text
    ended = subprocess.CompletedProcess(command, 1, text)
    assert verdicts(ended) == {"step": "stopped", "smoke": "stopped"}
    assert out.joinpath("results.md").read_text() == "{}\n"
    assert {path.name for path in out.iterdir()} == {"log.txt", "results.md", "step.json"}
    assert not Path("/proc", started.read_text().strip()).exists()


def test_a_stage_that_is_killed_is_not_out_of_time(tmp_path):
    python = program(tmp_path, "[[ $* != *bench_numbers* ]] || kill -9 $$")
    done = round_of("--device", "emulator", "smoke", out=tmp_path, seconds=60, python=str(python))
    assert done.returncode == 1 and verdicts(done) == {"smoke": "FAILED"}
    assert "smoke was killed before its time was up" in done.stdout


def test_tables_that_cannot_be_written_fail_the_round(tmp_path):
    """Python by a path from the repository's root, as in `--python .venv/bin/python`."""
    out = tmp_path / "out"
    python = program(
        tmp_path,
        f"""case $* in
    *bench_numbers*) echo '{{}}' > {shlex.quote(str(out / "smoke.json"))} ;;
    *gpu.py*) exit 1 ;;
esac""",
    )
    relative = os.path.relpath(python, BENCHMARKS.parent)
    done = round_of("--device", "emulator", "smoke", out=out, seconds=60, python=relative)
    assert verdicts(done) == {"smoke": "ok"}
    assert done.returncode == 1 and "the tables cannot be written" in done.stdout


@pytest.mark.parametrize(
    ("options", "out", "message"),
    [
        (["--minutes", "0.5"], "out", "--minutes is a whole number from 1 on, not 0.5"),
        (["--device", "tpu"], "out", "--device is cuda or emulator, not tpu"),
        (["--device", "emulator"], "file/out", "file/out: name another folder in OUT"),
    ],
)
def test_a_round_that_cannot_begin_says_why(options, out, message, tmp_path):
    tmp_path.joinpath("file").touch()
    done = round_of(*options, "step", out=tmp_path / out, seconds=60)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_the_round_explains_itself():
    command = [str(BENCHMARKS / "gpu_round.sh"), "everything"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Stages" in done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("*.sh")))
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", str(BENCHMARKS / script)], check=True)
