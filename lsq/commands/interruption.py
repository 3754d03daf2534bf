"""SIGINT, SIGTERM and SIGHUP: raised as errors, noted, or passed on to a child process of `lsq`."""

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
    """Exit because of a signal; the status is 128 plus the signal's number, as in shells."""

    def __init__(self, number: int, message: str):
        super().__init__(128 + number)
        self.number = number
        self.message = message


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise Interrupted on SIGTERM and SIGHUP within this context; ignored signals stay ignored."""

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
    """Context manager: a signal raises Interrupted, or is noted after `defer`; a second kills."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
    """Signals that a terminal sends to all its processes."""

    def __init__(self):
        self.requested: int | None = None
        self._immediate = True
        self._concluding = False
        # forked data loaders inherit the handlers; they end by SIGTERM, or when this process ends
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
        """Only note signals from now on; see `requested`."""
        self._immediate = False

    def conclude(self) -> None:
        """Ignore signals from now on. SIGTERM stays ignored after this context, since torchrun
        sends it to all processes once one ends."""
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
        # a data loader goes on, as does the update that needs its data
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
    """Run `lsq` in a child process and wait. ChildProcessError: it failed. BrokenPipeError: the
    reader of its output has gone. Interrupted: a signal came, and was passed on to the child."""
    command = [sys.executable, "-m", "lsq.commands.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with Interruption() as interruption:
        interruption.defer()
        # in a session of its own it gets signals only from here
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
