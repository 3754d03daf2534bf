"""One progress bar for a whole training, and its losses in a file."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fairseq.logging import meters, progress_bar
from fairseq.trainer import Trainer
from tqdm import tqdm

from lsq.commands.losses import read_losses
from lsq.fairseq.compatibility import replaced

RECORDED = ("loss", "nll_loss", "lr")
"""What is kept of fairseq's statistics; losses are in bits per target token."""
DIGITS = 6
"""After the point, where fairseq keeps 3: too few for the difference of two trainings."""


@contextlib.contextmanager
def recording(path: Path, updates: int, description: str, quiet: bool) -> Iterator[None]:
    """Within this context fairseq's training shows one bar of `updates` updates and appends its
    losses to `path`."""
    before, step, rounded = read_losses(path), Trainer.train_step, meters.safe_round
    done, seconds = min(before.updates, updates), before.seconds

    # fairseq's own clock stands still once a checkpoint is loaded
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
    """What fairseq makes for every epoch and every validation; `lines`: print one for each
    validation."""

    def __init__(
        self, iterable: Iterable, file, bar: tqdm, seconds: Callable[[], float], lines: bool
    ):
        super().__init__(iterable)
        self.file, self.bar, self.seconds, self.lines = file, bar, seconds, lines

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
    """Within this context fairseq's generation shows a bar of its batches and logs nothing to
    it."""

    def make(iterator: Iterable, **options) -> progress_bar.BaseProgressBar:
        return progress_bar.NoopProgressBar(
            tqdm(iterator, desc=description, unit=" batches", disable=quiet or None)
        )

    with replaced(progress_bar, progress_bar=make):
        yield
