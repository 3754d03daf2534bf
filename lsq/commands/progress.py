"""One progress bar for a whole training, and its losses in a file."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from tqdm import tqdm

from lsq.fairseq.compatibility import replaced

RECORDED = ("loss", "nll_loss", "lr")
"""What is kept of fairseq's statistics; losses are in bits per target token."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of one training: bits per target token, without label smoothing, by number of updates."""

    training: dict[int, float] = field(default_factory=dict)
    """Mean loss of the updates since the entry before, without label smoothing but with dropout."""
    validation: dict[int, float] = field(default_factory=dict)
    """Mean loss on the validation set, without label smoothing and dropout."""
    seconds: float = 0.0
    """Time spent in updates, in all sittings of a training that was resumed."""

    @property
    def updates(self) -> int:
        """Number of the last recorded update; 0 before the first."""
        return max([0, *self.training, *self.validation])


def read_losses(path: Path) -> LossCurve:
    """The curve in a file that `recording` wrote; empty where there is none.

    Where a training was resumed from before its last entry, the later entry of an update counts. Lines that are no
    entries, e.g. cut short by a full disk, are left out.
    """
    training, validation, seconds = {}, {}, 0.0
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
            kind, update, spent = entry["kind"], int(entry["update"]), float(entry["seconds"])
            loss = float(entry["nll_loss"] if "nll_loss" in entry else entry["loss"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        (training if kind == "train" else validation)[update] = loss
        seconds = max(seconds, spent)
    return LossCurve(
        training=dict(sorted(training.items())), validation=dict(sorted(validation.items())), seconds=seconds
    )


@contextlib.contextmanager
def recording(path: Path, updates: int, description: str, quiet: bool) -> Iterator[None]:
    """Within this context fairseq's training shows one bar of `updates` updates and appends its losses to `path`."""
    before = read_losses(path)
    done = min(before.updates, updates)
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=updates, initial=done, desc=description, unit=" updates", disable=quiet or None) as bar,
    ):

        clock = _Clock(before.seconds)

        def make(iterator: Iterable, *, prefix: str | None = None, **options) -> progress_bar.BaseProgressBar:
            return _Recorder(iterator, file, bar, clock, lines=bar.disable and not quiet)

        with replaced(progress_bar, progress_bar=make), replaced(Trainer, train_step=clock.timing(Trainer.train_step)):
            yield


class _Clock:
    """Seconds spent in updates, on top of those `before`."""

    def __init__(self, before: float):
        self.seconds = before

    def timing(self, step: Callable) -> Callable:
        """`step`, an update, with its time counted. (fairseq's own clock stands still once a checkpoint is loaded.)"""

        def timed(*arguments, **options):
            start = time.perf_counter()
            try:
                return step(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class _Recorder(progress_bar.BaseProgressBar):
    """What fairseq makes for every epoch and every validation; `lines`: print one for each validation."""

    def __init__(self, iterable: Iterable, file, bar: tqdm, clock: _Clock, lines: bool):
        super().__init__(iterable)
        self.file, self.bar, self.clock, self.lines = file, bar, clock, lines

    def __iter__(self) -> Iterator:
        return iter(self.iterable)

    def log(self, stats: dict, tag: str | None = None, step: int | None = None) -> None:
        """Called every --log-interval updates."""
        self._record("train", stats, step)
        self.bar.set_postfix(loss=f"{float(stats['loss']):.2f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def print(self, stats: dict, tag: str | None = None, step: int | None = None) -> None:
        """Called after an epoch and after a validation."""
        if tag == "valid":
            self._record("valid", stats, step)
            if self.lines:
                loss = f"validation loss {float(stats['nll_loss']):.3f}"
                print(f"update {step} of {self.bar.total}: {loss}, {self.clock.seconds:.0f} s of training", flush=True)
        logging.getLogger("lsq").info("%s at update %s: %s", tag, step, self._str_pipes(self._format_stats(stats)))

    def _record(self, kind: str, stats: dict, step: int) -> None:
        values = {name: float(stats[name]) for name in RECORDED if name in stats}
        entry = {"kind": kind, "update": step, "seconds": self.clock.seconds, **values}
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


@contextlib.contextmanager
def one_bar(description: str, quiet: bool) -> Iterator[None]:
    """Within this context fairseq's generation shows a bar of its batches and logs nothing to it."""

    def make(iterator: Iterable, **options) -> progress_bar.BaseProgressBar:
        return progress_bar.NoopProgressBar(tqdm(iterator, desc=description, unit=" batches", disable=quiet or None))

    with replaced(progress_bar, progress_bar=make):
        yield
