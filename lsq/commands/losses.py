"""The losses of a training: record them beside one progress bar, read them, draw them."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.logging import meters, progress_bar
from fairseq.trainer import Trainer
from tqdm import tqdm

from lsq import extras
from lsq.fairseq.compatibility import replaced

LOSSES = "losses.jsonl"
RECORDED = ("loss", "nll_loss", "lr")
DIGITS = 6
"""Decimals in the log; fairseq's 3 are too few for the difference of two trainings."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses by number of updates, in bits per target token without label smoothing."""

    training: dict[int, float] = field(default_factory=dict)
    """Update -> mean loss of the updates since the entry before, with dropout."""
    validation: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds in updates, of all parts of a training that was resumed."""

    @property
    def updates(self) -> int:
        """Number of the last recorded update; 0 before the first."""
        return max([0, *self.training, *self.validation])


def read_losses(path: Path) -> LossCurve:
    """Read a file of `recording`, if there is one; the last entry of an update counts."""
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
        training=dict(sorted(training.items())),
        validation=dict(sorted(validation.items())),
        seconds=seconds,
    )


def draw_losses(curves: dict[str, LossCurve], path: Path, title: str) -> None:
    """Draw losses over updates into one PNG file: lines for training, dots for validation."""
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        color, dots = f"C{number}", {"marker": "o", "markersize": 3}
        for losses, kind, style in (
            (curve.training, "training", {"alpha": 0.4, "linewidth": 1}),
            (curve.validation, "validation", dots),
        ):
            points = list(losses), list(losses.values())
            axes.plot(*points, color=color, label=f"{name}, {kind}", **style)
    axes.set(xlabel="updates", ylabel="bits per target token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=120)


@contextlib.contextmanager
def recording(path: Path, updates: int, description: str, quiet: bool) -> Iterator[None]:
    """Show one progress bar for fairseq's training, and append its losses to `path`."""
    before, step, rounded = read_losses(path), Trainer.train_step, meters.safe_round
    done, seconds = min(before.updates, updates), before.seconds

    # fairseq's own clock stops once a checkpoint is loaded
    def timed(*arguments, **options):
        nonlocal seconds
        start = time.perf_counter()
        try:
            return step(*arguments, **options)
        finally:
            seconds += time.perf_counter() - start

    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(
            total=updates, initial=done, desc=description, unit=" updates", disable=quiet or None
        ) as bar,
    ):

        def make(
            iterator: Iterable, *, prefix: str | None = None, **options
        ) -> progress_bar.BaseProgressBar:
            return _Recorder(iterator, file, bar, lambda: seconds, lines=bar.disable and not quiet)

        with (
            replaced(progress_bar, progress_bar=make),
            replaced(Trainer, train_step=timed),
            replaced(
                meters, safe_round=lambda number, digits: rounded(number, max(digits, DIGITS))
            ),
        ):
            yield


class _Recorder(progress_bar.BaseProgressBar):
    """Replacement of fairseq's progress bars; with `lines`, each validation prints a line."""

    def __init__(
        self, iterable: Iterable, file, bar: tqdm, seconds: Callable[[], float], lines: bool
    ):
        super().__init__(iterable)
        self.file, self.bar, self.seconds, self.lines = file, bar, seconds, lines

    def __iter__(self) -> Iterator:
        return iter(self.iterable)

    def log(self, stats: dict, tag: str | None = None, step: int | None = None) -> None:
        """Record losses; fairseq calls it every --log-interval updates."""
        self._record("train", stats, step)
        self.bar.set_postfix(loss=f"{float(stats['loss']):.2f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def print(self, stats: dict, tag: str | None = None, step: int | None = None) -> None:
        """Record a validation; fairseq calls it after epochs and validations."""
        if tag == "valid":
            self._record("valid", stats, step)
            if self.lines:
                loss = f"validation loss {float(stats['nll_loss']):.3f}"
                print(
                    f"update {step} of {self.bar.total}: {loss}, {self.seconds():.0f} s"
                    " of training",
                    flush=True,
                )
        logging.getLogger("lsq").info(
            "%s at update %s: %s", tag, step, self._str_pipes(self._format_stats(stats))
        )

    def _record(self, kind: str, stats: dict, step: int) -> None:
        values = {name: float(stats[name]) for name in RECORDED if name in stats}
        entry = {"kind": kind, "update": step, "seconds": self.seconds(), **values}
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


@contextlib.contextmanager
def one_bar(description: str, quiet: bool) -> Iterator[None]:
    """Show a progress bar for the batches of fairseq's generation."""

    def make(iterator: Iterable, **options) -> progress_bar.BaseProgressBar:
        return progress_bar.NoopProgressBar(
            tqdm(iterator, desc=description, unit=" batches", disable=quiet or None)
        )

    with replaced(progress_bar, progress_bar=make):
        yield
