import json
import signal
import subprocess
import sys
import textwrap

import pytest

from lsq.commands import side_by_side
from lsq.commands.interruption import Interrupted
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_reaches_every_process(trainings, tmp_path, number):
    interrupt = f"""
        while not (os.path.exists("../run0/started") and os.path.exists("../run1/started")):
            time.sleep(0.05)
        os.kill(os.getppid(), {number})
        time.sleep(60)
    """
    with pytest.raises(Interrupted) as stopped:
        train_side_by_side(trainings(SLOW, SLOW, interrupt), threads=1, quiet=True)
    assert stopped.value.code == 128 + number
    assert stopped.value.message == "stopped; run the same command again to continue from the last checkpoints"
    assert (tmp_path / "run0" / "stopped").exists() and (tmp_path / "run1" / "stopped").exists()


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
