"""A subcommand of lsq in a process of its own."""

import contextlib
import errno
import os
import signal
import subprocess
import sys

from lsq.commands.interruption import Interrupted, Interruption

POLL_SECONDS = 0.3


def run_lsq(arguments: list[str], *, threads: int) -> None:
    """Run `lsq` with these arguments and this many threads, and wait for it; it writes to the same
    screen.

    Raises:
        ChildProcessError: it failed, and has said why.
        BrokenPipeError: nobody reads the screen any more.
        Interrupted: a signal came; it was passed on to the process, which has ended.
    """
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
