import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from lsq.commands import interruption
from lsq.commands.interruption import Interrupted, Interruption, raised, run_lsq


@pytest.fixture(autouse=True)
def own_terminal():
    """SIGHUP as a terminal's processes have it; those of `nohup` ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", Interruption.SIGNALS)
def test_signals_are_immediate_or_noted(number):
    """However often a terminal that closes says so; handlers come back."""
    before = [signal.getsignal(each) for each in Interruption.SIGNALS]
    with pytest.raises(Interrupted) as stopped, Interruption():
        send(number)
    assert stopped.value.code == 128 + number
    with Interruption() as interruption:
        interruption.defer()
        assert interruption.requested is None
        for _ in range(1 + (number == signal.SIGHUP)):
            send(number)
        assert interruption.requested == number
    with Interruption() as interruption:
        interruption.defer()
        with pytest.raises(Interrupted), interruption.at_once():
            send(number)
    assert [signal.getsignal(each) for each in Interruption.SIGNALS] == before


def test_ignored_signals_stay_ignored():
    """As nohup and shells' background jobs want it."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in Interruption.SIGNALS}
    try:
        with Interruption() as interruption:
            for number in before:
                send(number)
            assert interruption.requested is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_process_that_concludes_ignores_signals():
    """SIGTERM also afterwards: torchrun sends it to all when one ends."""
    before = [signal.getsignal(number) for number in Interruption.SIGNALS]
    try:
        with Interruption() as interruption:
            interruption.conclude()
            send(signal.SIGTERM)
            send(signal.SIGINT)
            assert interruption.requested is None
        send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == before[0]
    finally:
        signal.signal(signal.SIGTERM, before[1])


SCRIPT = """
import os, signal, time
from lsq.commands.interruption import Interruption
with Interruption() as interruption:
    interruption.defer()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        time.sleep(60)
        os._exit(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGHUP)
    time.sleep(0.5)
    print(os.waitpid(child, os.WNOHANG)[0], flush=True)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), interruption.requested, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_second_signal_and_forked_processes_are_not_deferred():
    """Terminals' signals are left to the process that trains; others load its data."""
    start = time.monotonic()
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["0", "-15", "None", "noted"]
    assert done.returncode == -signal.SIGTERM
    assert time.monotonic() - start < 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_raised_within_a_context(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=str(128 + number)) as stopped, raised():
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert stopped.value.message == f"stopped by {signal.Signals(number).name}"
    assert signal.getsignal(number) == before


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(script): run_lsq with a Python script in the place of `lsq`."""
    started = subprocess.Popen

    def start(command, **options):
        assert command[:3] == [sys.executable, "-m", "lsq.commands.cli"]
        return started([sys.executable, *command[3:]], cwd=tmp_path, **options)

    monkeypatch.setattr(interruption.subprocess, "Popen", start)
    monkeypatch.setattr(interruption, "POLL_SECONDS", 0.05)
    imports = "import os, sys, time, signal\n"
    return lambda script: run_lsq(["-c", imports + textwrap.dedent(script)], threads=3)


def test_threads_and_failures(run, tmp_path, capfd):
    run('open("threads", "w").write(os.environ["OMP_NUM_THREADS"])')
    assert (tmp_path / "threads").read_text() == "3"
    message = "lsq -c ended with status 2; what it said is above"
    with pytest.raises(ChildProcessError, match=message):
        run('sys.exit(print("lsq train-text: error: no luck", file=sys.stderr) or 2)')
    assert capfd.readouterr().err == "lsq train-text: error: no luck\n"
    with pytest.raises(BrokenPipeError):  # a reader that has gone ends the parent, too
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
    advice = "run the same command again to continue from the last checkpoint"
    assert stopped.value.message == f"stopped; {advice}"
    assert (tmp_path / "stopped").exists()
