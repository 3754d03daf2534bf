"""One progress bar for a whole training, and its losses in a file."""

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.logging import metrics, progress_bar
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
    """Time spent in updates."""

    @property
    def updates(self) -> int:
        """Number of the last recorded update; 0 before the first."""
        return max([0, *self.training, *self.validation])


def read_losses(path: Path) -> LossCurve:
    """The curve in a file that `recording` wrote; empty where there is none.

    Where a training was resumed from before its last entry, the later entry of an update counts.
    """
    training, validation, seconds = {}, {}, 0.0
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # being written, or cut short by a full disk
            continue
        if entry["kind"] == "train":
            training[entry["update"]] = entry.get("nll_loss", entry["loss"])
            seconds = entry["seconds"]
        else:
            validation[entry["update"]] = entry["nll_loss"]
    return LossCurve(
        training=dict(sorted(training.items())), validation=dict(sorted(validation.items())), seconds=seconds
    )


@contextlib.contextmanager
def recording(path: Path, updates: int, description: str, quiet: bool) -> Iterator[None]:
    """Within this context fairseq's training shows one bar of `updates` updates and appends its losses to `path`."""
    done = min(read_losses(path).updates, updates)
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=updates, initial=done, desc=description, unit=" updates", disable=quiet) as bar,
    ):

        def make(iterator: Iterable, *, prefix: str | None = None, **options) -> progress_bar.BaseProgressBar:
            return _Recorder(iterator, file, bar)

        with replaced(progress_bar, progress_bar=make):
            yield


class _Recorder(progress_bar.BaseProgressBar):
    """What fairseq makes for every epoch and every validation."""

    def __init__(self, iterable: Iterable, file, bar: tqdm):
        super().__init__(iterable)
        self.file, self.bar = file, bar

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
        logging.getLogger("lsq").info("%s at update %s: %s", tag, step, self._str_pipes(self._format_stats(stats)))

    def _record(self, kind: str, stats: dict, step: int) -> None:
        values = {name: float(stats[name]) for name in RECORDED if name in stats}
        clock = metrics.get_meter("default", "train_wall")  # None before the first update
        entry = {"kind": kind, "update": step, "seconds": clock.sum if clock else 0.0, **values}
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


@contextlib.contextmanager
def one_bar(description: str, quiet: bool) -> Iterator[None]:
    """Within this context fairseq's generation shows a bar of its batches and logs nothing to it."""

    def make(iterator: Iterable, **options) -> progress_bar.BaseProgressBar:
        return progress_bar.NoopProgressBar(tqdm(iterator, desc=description, unit=" batches", disable=quiet))

    with replaced(progress_bar, progress_bar=make):
        yield
