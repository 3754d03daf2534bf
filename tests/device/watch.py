"""What PyTorch launches on the test device and what the host waits for, with the lines that asked
for it."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import lsq
from tests.device import standin

PACKAGES = tuple(Path(module.__file__).parent for module in (lsq, torch))


@dataclass(frozen=True)
class Event:
    """One launch or wait."""

    what: str
    stream: int
    lines: tuple[str, ...]
    """Innermost first, as "lsq/layers/module.py:120 execute": of lsq, else of PyTorch; none where
    autograd calls."""

    def __str__(self) -> str:
        return f"{self.what}  {' < '.join(self.lines[:3]) or 'autograd'}"


@dataclass
class Record:
    """What happened, in order."""

    launches: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    faults: list[Event] = field(default_factory=list)

    @staticmethod
    def table(events: list[Event]) -> str:
        """Equal ones together, most frequent first."""
        return "\n".join(
            f"{count:4}  {event}" for event, count in Counter(map(str, events)).most_common()
        )


@contextlib.contextmanager
def watched() -> Iterator[Record]:
    """Within this context: what PyTorch launches on the test device, and what the host waits
    for."""
    record = Record()

    def note(what: int, name: str, stream: int) -> None:
        event = Event(name, stream, _lines())
        {standin.LAUNCH: record.launches, standin.WAIT: record.waits, standin.FAULT: record.faults}[
            what
        ].append(event)

    with standin.watching(note):
        yield record


def _lines() -> tuple[str, ...]:
    found: dict[Path, list[str]] = {package: [] for package in PACKAGES}
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for package, lines in found.items():
            if code.co_filename.startswith(f"{package}{os.sep}"):
                path = code.co_filename[len(str(package.parent)) + 1 :]
                lines.append(f"{path}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(next(filter(None, found.values()), ()))
