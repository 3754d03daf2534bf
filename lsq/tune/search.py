"""Tunes many products into a file, which always holds all that is done: stop it and go on whenever you like."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lsq.gemm import configuration_file
from lsq.gemm.configuration import Entry, Times, now
from lsq.gemm.configuration_file import ConfigurationFile
from lsq.gemm.device import Validators, difference
from lsq.gemm.product_key import ProductKey
from lsq.lock import locked_file
from lsq.tune.trial import Backend, Outcome, Settings, compare


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run of the tuner did."""

    path: Path
    entries: tuple[Entry, ...]
    """Measured now."""
    skipped: int
    """Products that had an entry already."""
    failed: tuple[tuple[ProductKey, str], ...]
    """Products that cannot be tuned here, and why."""
    refused: int
    """Candidates that computed wrong results or did not run."""
    incomplete: int
    """Entries for which the time was too short for every candidate."""
    left: int
    """Products that were not reached."""
    interrupted: bool
    """By Ctrl-C."""


def opened(path: Path, validators: Validators) -> ConfigurationFile:
    """The file to go on with: what is there, or a new one.

    Raises:
        ValueError: it is damaged, or of another device or library.
        OSError: it cannot be read.
    """
    if not path.exists():
        return ConfigurationFile(validators=validators)
    file = configuration_file.read(path)
    found = difference(file.validators, validators)
    if found is not None:
        raise ValueError(f"{path} holds the products of another device: {found}; choose another --output")
    return file


def tune(
    backend: Backend,
    keys: Sequence[ProductKey],
    path: Path,
    validators: Validators,
    *,
    settings: Settings | None = None,
    again: bool = False,
    seconds: float = float("inf"),
    progress: Callable[[ProductKey, Outcome | None], None] = lambda key, outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Find the best way to run each product that has no entry yet, and write each entry as soon as it is there.

    Args:
        backend: the products of this device.
        keys: in the order in which they are tuned; those that round to the same one are tuned once.
        path: the file, which is made or gone on with.
        validators: of this device.
        again: tune also what has an entry.
        seconds: after so many, no further product is begun, and the one at hand takes up no further candidates.
        progress: called after each product, with None for what was skipped or failed.

    Raises:
        ValueError: the file is damaged or of another device.
        OSError: another tuner is writing the file, or it cannot be written.
    """
    settings = settings or Settings()
    deadline = clock() + seconds
    rounded = list(dict.fromkeys(key.rounded() for key in keys))
    entries, failed = [], []
    skipped = refused = incomplete = 0
    interrupted = False
    with locked_file(path, "choose another --output"):
        file = opened(path, validators)
        known = set() if again else {entry.key for entry in file.entries}
        try:
            for key in rounded:
                if key in known:
                    skipped += 1
                    progress(key, None)
                    continue
                if clock() >= deadline:
                    break
                try:
                    outcome = _tune_one(backend, key, settings, deadline, clock)
                except (RuntimeError, ValueError, MemoryError) as error:
                    failed.append((key, str(error)))
                    progress(key, None)
                    continue
                entries.append(_entry(key, outcome))
                file = file.with_entries(entries[-1:])
                configuration_file.write(path, file)
                refused += len(outcome.refused)
                incomplete += not outcome.complete
                progress(key, outcome)
        except KeyboardInterrupt:
            interrupted = True
    return Summary(
        path=path,
        entries=tuple(entries),
        skipped=skipped,
        failed=tuple(failed),
        refused=refused,
        incomplete=incomplete,
        left=len(rounded) - skipped - len(failed) - len(entries),
        interrupted=interrupted,
    )


def _tune_one(backend, key, settings, deadline, clock) -> Outcome:
    candidates = backend.candidates(key)
    with contextlib.closing(backend.trial(key)) as trial:
        outcome = compare(trial, candidates, settings, deadline=deadline, clock=clock)
    for _ in range(settings.confirmations):
        if outcome.configuration == candidates[0]:
            break
        with contextlib.closing(backend.trial(key)) as trial:
            again = compare(trial, [candidates[0], outcome.configuration], settings)
        counts = {name: getattr(outcome, name) for name in ("tried", "refused", "complete")}
        outcome = dataclasses.replace(again, **counts)
    return outcome


def _entry(key: ProductKey, outcome: Outcome) -> Entry:
    microseconds = {name: round(1e6 * getattr(outcome, name), 3) for name in ("chosen", "default", "float")}
    return Entry(
        key=key, configuration=outcome.configuration, times=Times(**microseconds), spread=round(outcome.spread, 4),
        date=now(),
    )
