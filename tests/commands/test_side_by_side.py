import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from lsq.commands import side_by_side
from lsq.commands.side_by_side import Training, train_side_by_side


@pytest.fixture
def trainings(tmp_path, monkeypatch):
    """trainings(script, ...): one Training for each Python script, which takes the place of `lsq`."""
    started = subprocess.Popen

    def start(command, **options):
        assert command[:3] == [sys.executable, "-m", "lsq.cli"]
        return started([sys.executable, *command[3:]], **options)

    monkeypatch.setattr(side_by_side.subprocess, "Popen", start)
    monkeypatch.setattr(side_by_side, "POLL_SECONDS", 0.05)

    def trainings(*scripts: str) -> list[Training]:
        made = []
        for number, script in enumerate(scripts):
            folder = tmp_path / f"run{number}"
            folder.mkdir()
            code = f"import os, sys, time, signal\nos.chdir({str(folder)!r})\n" + textwrap.dedent(script)
            made.append(Training(name=folder.name, arguments=["-c", code], folder=folder, updates=10))
        return made

    return trainings


FINE = """
    threads = os.environ["OMP_NUM_THREADS"]
    open("results.json", "w").write('{"threads": ' + threads + '}')
"""
SLOW = """
    def stop(*_):
        open("stopped", "w").close()
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    open("started", "w").close()
    time.sleep(60)
"""


def test_results_of_all(trainings):
    assert train_side_by_side(trainings(FINE, FINE), threads=3, quiet=True) == {
        "run0": {"threads": 3},
        "run1": {"threads": 3},
    }


def test_failure_stops_the_others_and_says_why(trainings, tmp_path):
    fail = """
        while not os.path.exists("../run0/started"):
            time.sleep(0.05)
        print("lsq train-text: error: no luck")
        sys.exit(2)
    """
    with pytest.raises(ChildProcessError, match="run run1 ended with status 2: lsq train-text: error: no luck"):
        train_side_by_side(trainings(SLOW, fail), threads=1, quiet=True)
    assert (tmp_path / "run0" / "stopped").exists()


def test_interruption_reaches_every_process(tmp_path):
    """Through the command line itself: SIGTERM to `lsq numbers` reaches both trainings."""
    command = [sys.executable, "-m", "lsq.cli", "numbers", "--output", str(tmp_path), "--train-pairs", "300"]
    command += ["--test-pairs", "5", "--updates", "100"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for name in ("float", "int8"):
            wait_for(process, lambda path=tmp_path / name / "model" / "losses.jsonl": read(path))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.terminate()  # not kill: it has processes of its own to stop
        process.wait()
    assert process.returncode == 143
    assert errors.splitlines()[-1].startswith("lsq numbers: stopped; run the same command again")
    for name in ("float", "int8"):
        assert "stopped by SIGTERM after" in read(tmp_path / f"{name}-output.txt")
        assert (tmp_path / name / "model" / "checkpoint_last.pt").exists()


def read(path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(process: subprocess.Popen, condition) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)


def test_bars_follow_the_loss_files(tmp_path):
    shown = []

    class Bar:
        n = 4

        def set_postfix(self, **values):
            shown.append(values["loss"])

        def update(self, count):
            shown.append(count)

    (tmp_path / "model").mkdir()
    entry = {"kind": "train", "update": 7, "seconds": 1.0, "loss": 2.345}
    (tmp_path / "model" / "losses.jsonl").write_text(json.dumps(entry) + "\n")
    side_by_side._show(Bar(), Training(name="x", arguments=[], folder=tmp_path, updates=10))
    assert shown == ["2.35", 3] or shown == ["2.35", 3.0] or shown == ["2.34", 3]
