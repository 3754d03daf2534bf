import signal
import subprocess
import sys
import textwrap

import pytest

from lsq.commands import child
from lsq.commands.child import run_lsq
from lsq.commands.interruption import Interrupted


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(script): run_lsq with a Python script in the place of `lsq`."""
    started = subprocess.Popen

    def start(command, **options):
        assert command[:3] == [sys.executable, "-m", "lsq.commands.cli"]
        return started([sys.executable, *command[3:]], cwd=tmp_path, **options)

    monkeypatch.setattr(child.subprocess, "Popen", start)
    monkeypatch.setattr(child, "POLL_SECONDS", 0.05)
    return lambda script: run_lsq(
        ["-c", "import os, sys, time, signal\n" + textwrap.dedent(script)], threads=3
    )


def test_threads(run, tmp_path):
    run('open("threads", "w").write(os.environ["OMP_NUM_THREADS"])')
    assert (tmp_path / "threads").read_text() == "3"


def test_failure_says_why(run, capfd):
    with pytest.raises(
        ChildProcessError, match="lsq -c ended with status 2; what it said is above"
    ):
        run('sys.exit(print("lsq train-text: error: no luck", file=sys.stderr) or 2)')
    assert capfd.readouterr().err == "lsq train-text: error: no luck\n"


def test_a_reader_that_has_gone_ends_the_parent_too(run):
    with pytest.raises(BrokenPipeError):
        run("sys.exit(128 + signal.SIGPIPE)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interruption_is_passed_on_and_waits_until_the_process_has_stopped(run, tmp_path, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("ignored here, as under nohup")
    with pytest.raises(Interrupted) as stopped:
        run(f"""
            def stop(*_):
                time.sleep(0.2)
                open("stopped", "w").close()
                sys.exit(143)
            signal.signal({int(number)}, stop)
            os.kill(os.getppid(), {int(number)})
            time.sleep(60)
        """)
    assert stopped.value.code == 128 + number
    assert (
        stopped.value.message
        == "stopped; run the same command again to continue from the last checkpoint"
    )
    assert (tmp_path / "stopped").exists()
