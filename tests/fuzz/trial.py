"""What a command may do with what it is given: work, or say in one line why not."""

import contextlib
import hashlib
import io
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lsq.commands import cli
from tests.commands.conftest import files_in

SECONDS = 20.0
"""Longer is a hang; sound calls take less than a twentieth."""
MEMORY = 2**30
"""Bytes of address space that one call may take beyond what the process has."""
LONGEST = 2500
"""Characters of a message: no line of a file comes back whole."""
MUTATIONS, QUICK = 1000, 200
SHOWN = 5


class Hang(BaseException):
    """A call takes too long."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    result: object = None
    refusal: str | None = None
    """What it told the user, in one line; None: it did what was asked."""
    fault: str | None = None


def counts(by_default: int, when_slow: int = MUTATIONS) -> pytest.MarkDecorator:
    """Run a test with so many mutations, and with more where slow tests are run."""
    everything = pytest.param(when_slow, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    return pytest.mark.parametrize("count", [by_default, everything])


quick_counts = pytest.mark.parametrize(
    "count", [QUICK, pytest.param(MUTATIONS, marks=pytest.mark.thorough)]
)
"""For mutations of milliseconds: all of them in `make test-thorough`."""


def survey(kind: str, count: int, attempt: Callable[[random.Random], Outcome]) -> tuple[int, int]:
    """Make attempts, each with its own generator, and fail with their faults; returns how many
    worked, and how many were refused."""
    worked, faults = 0, []
    for number in range(count):
        outcome = attempt(random.Random(f"{kind} {number}"))
        if outcome.fault is not None:
            faults.append(f"mutation {number}: {outcome.fault}")
        worked += outcome.refusal is None
    assert not faults, "\n".join(
        [f"{kind}: {len(faults)} faults in {count} mutations", *faults[:SHOWN]]
    )
    return worked, count - worked


def outcome(call: Callable[[], object], folder: Path | None = None) -> Outcome:
    """Call, and judge how it ended, as `lsq.commands.cli` does; no file in `folder` may change."""
    before = digests(folder) if folder else {}
    found = _outcome(call)
    changed = sorted(dict(before.items() ^ (digests(folder) if folder else {}).items()))
    return found if found.fault or not changed else Outcome(fault=f"changed {changed}")


def _outcome(call: Callable[[], object]) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limits():
            result = call()
    except Hang as error:
        return Outcome(fault=f"more than {SECONDS} s, at {_place(error)}")
    except BaseException as error:  # as the command line does
        status, message = cli.describe(error)
        if isinstance(error, SystemExit) and message is None:  # argparse has said it
            return _refused(err.getvalue()) if status else Outcome()
        return (
            Outcome(fault=f"{error!r:.500}, at {_place(error)}")
            if message is None
            else _refused(message)
        )
    return (
        _refused(err.getvalue()) if type(result) is int and result != 0 else Outcome(result=result)
    )


def _refused(said: str) -> Outcome:
    said = said.strip()
    if not said:
        return Outcome(fault="an exit status that is not 0, and no word why")
    if cli.OUT_OF_MEMORY.search(said) or "not enough memory" in said:
        return Outcome(fault=f"takes more than {MEMORY} bytes: {said:.500}")
    if len(said) > LONGEST or "\n" in said or "Traceback" in said:
        return Outcome(fault=f"a message of {len(said)} characters: {said[:LONGEST]}")
    return Outcome(refusal=said)


def _place(error: BaseException) -> str:
    return " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)[:-6:-1]
    )


@contextlib.contextmanager
def limits(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Make a hang an exception, and limit the memory of this process, within this context."""

    def expired(*_) -> None:
        raise Hang

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, expired)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def digests(folder: Path) -> dict[str, str]:
    """Path of every file in a folder -> checksum."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in files_in(folder).items()}
