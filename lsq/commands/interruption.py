"""SIGINT, SIGTERM and SIGHUP: noted, raised, and passed on to a process of `lsq`."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator


def name_of(number: int) -> str:
    return "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name


class Interrupted(SystemExit):
    """A signal ended the work; the exit status is 128 plus its number, as shells have it."""

    def __init__(self, number: int, message: str):
        super().__init__(128 + number)
        self.number = number
        self.message = message


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise Interrupted here; those that are ignored stay ignored."""

    def handle(number: int, frame: object) -> None:
        raise Interrupted(number, f"stopped by {name_of(number)}")

    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interruption:
    """Context manager that notes a signal instead of dying of it; a second one ends the process."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
    """Those that a terminal sends to all its processes."""

    def __init__(self):
        self.requested: int | None = None
        self._immediate = True
        self._concluding = False
        # those that it forks, to load data, end by SIGTERM, or when this one ends
        self._process = os.getpid()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._previous.items():
            ignored = self._concluding and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    def defer(self) -> None:
        """From now on only note signals; see `requested`."""
        self._immediate = False

    def conclude(self) -> None:
        """Ignore signals, SIGTERM for good: torchrun sends it to all once one process ends."""
        self._concluding = True

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise Interrupted at once within this context."""
        before, self._immediate = self._immediate, True
        try:
            yield
        finally:
            self._immediate = before

    def _handle(self, number: int, frame: object) -> None:
        if self._concluding and os.getpid() == self._process:
            return
        if number == self.requested == signal.SIGHUP:  # a terminal that closes may send it twice
            return
        # the update that it loads data for goes on
        if os.getpid() != self._process and number in self.OF_TERMINALS:
            return
        if self.requested is not None or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = number
        if self._immediate:
            raise Interrupted(number, f"stopped by {name_of(number)} before the first update")


POLL_SECONDS = 0.3


def run_lsq(arguments: list[str], *, threads: int) -> None:
    """Run `lsq` and wait for it; ChildProcessError, BrokenPipeError, or Interrupted (passed on)."""
    command = [sys.executable, "-m", "lsq.commands.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with Interruption() as interruption:
        interruption.defer()
        # signals reach it from here alone
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            while interruption.requested is None and process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.send_signal(interruption.requested or signal.SIGTERM)
            status = process.wait()
    if interruption.requested is not None:
        raise Interrupted(
            interruption.requested,
            "stopped; run the same command again to continue from the last checkpoint",
        )
    if status == 128 + signal.SIGPIPE:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    if status:
        raise ChildProcessError(
            f"lsq {arguments[0]} ended with status {status}; what it said is above"
        )
