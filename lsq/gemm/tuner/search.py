"""Tunes many products and writes each entry at once, so that a run may stop anywhere."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lsq.files.lock import locked_file
from lsq.gemm import configuration_file
from lsq.gemm.configuration import Entry, Times, now
from lsq.gemm.configuration_file import ConfigurationFile, Validators, difference
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuner.trial import Outcome, Settings, Trials, compare


@dataclass(kw_only=True)
class Summary:
    """The result of a run of the tuner."""

    path: Path
    left: int
    """Products that were not reached."""
    entries: list[Entry] = field(default_factory=list)
    """Entries that were measured in this run."""
    skipped: int = 0
    """Products that already had an entry."""
    failed: list[tuple[ProductKey, str]] = field(default_factory=list)
    """Products that cannot be tuned here, and why."""
    refused: int = 0
    """Candidates that computed wrong results or did not run."""
    incomplete: int = 0
    """New entries for which there was no time to try every candidate."""
    interrupted: bool = False
    """Whether Ctrl-C ended the run."""


def opened(path: Path, validators: Validators) -> ConfigurationFile:
    """Return the file at `path`, or a new one. Raises ValueError: it is damaged, or for another
    device or library; OSError: it cannot be read."""
    if not path.exists():
        return ConfigurationFile(validators=validators)
    file = configuration_file.read(path)
    refusal = difference(file.validators, validators)
    if refusal is not None:
        raise ValueError(
            f"{path} holds the products of another device: {refusal}; choose another --output"
        )
    return file


def tune(
    trials: Trials,
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
    """Find the best way to run each product that has no entry yet, and write each entry at once.

    Args:
        trials: makes the trials of this device.
        keys: in the order of tuning; keys that are rounded to the same key are tuned once.
        path: the file, which may exist.
        validators: the validators of this device.
        settings: of the measurements.
        again: tune products that have an entry, too.
        seconds: after this time no product is begun, and the current one gets no more candidates.
        progress: called after each product without an entry; the outcome is None if it failed.
        clock: returns seconds.

    Raises:
        ValueError: the file is damaged or for another device.
        OSError: another tuner is writing the file, or it cannot be written.
    """
    settings = settings or Settings()
    deadline = clock() + seconds
    rounded = list(dict.fromkeys(key.rounded() for key in keys))
    summary = Summary(path=path, left=len(rounded))
    with locked_file(path, "choose another --output"):
        file = opened(path, validators)
        known = set() if again else {entry.key for entry in file.entries}
        try:
            for key in rounded:
                outcome = None
                if key in known:
                    summary.skipped += 1
                    summary.left -= 1
                    continue
                if clock() >= deadline:
                    break
                try:
                    outcome = _tune_one(trials, key, settings, deadline, clock)
                except (RuntimeError, ValueError, MemoryError) as error:
                    summary.failed.append((key, str(error)))
                else:
                    summary.entries.append(_entry(key, outcome))
                    file = file.with_entries(summary.entries[-1:])
                    configuration_file.write(path, file)
                    summary.refused += len(outcome.refused)
                    summary.incomplete += not outcome.complete
                summary.left -= 1
                progress(key, outcome)
        except KeyboardInterrupt:
            summary.interrupted = True
    return summary


def _tune_one(trials, key, settings, deadline, clock) -> Outcome:
    with contextlib.closing(trials(key)) as trial:
        candidates = trial.candidates()
        outcome = compare(trial, candidates, settings, deadline=deadline, clock=clock)
    for _ in range(settings.confirmations):
        if outcome.configuration == candidates[0]:
            break
        with contextlib.closing(trials(key)) as trial:
            again = compare(trial, [candidates[0], outcome.configuration], settings)
        counts = {name: getattr(outcome, name) for name in ("refused", "complete")}
        # if both are of one kind, the first comparison gives the other kind's time
        if again.other is None and outcome.other is not None:
            counts["other"] = outcome.other / outcome.chosen * again.chosen
        outcome = dataclasses.replace(again, **counts)
    return outcome


def _entry(key: ProductKey, outcome: Outcome) -> Entry:
    times = {name: getattr(outcome, name) for name in ("chosen", "default", "float", "other")}
    microseconds = {
        name: None if time is None else round(1e6 * time, 3) for name, time in times.items()
    }
    return Entry(
        key=key,
        configuration=outcome.configuration,
        times=Times(**microseconds),
        spread=round(outcome.spread, 4),
        date=now(),
    )
