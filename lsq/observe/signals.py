"""Signals of a training: each rounded tensor's clip, its gradient, clipped and zero shares."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lsq.observe.statistics import TensorStatistics, observe, quantized_tensors

logger = logging.getLogger(__name__)

LEAST_INTERVAL = 25
"""Least number of steps between collections: one makes a step about 1.5 times as long."""
LARGEST_CLIPPED_SHARE = 0.05
SMALLEST_CODE = 7
"""An 8-bit tensor without larger |code| uses fewer than 4 of the 7 bits of a magnitude."""
FIGURES = ("clip", "clipped_share", "zero_share")


def interval_of(log_interval: int) -> int:
    """Return the smallest multiple of a log interval that is at least LEAST_INTERVAL."""
    log_interval = max(log_interval, 1)
    return log_interval * -(-LEAST_INTERVAL // log_interval)


def complaint(statistics: TensorStatistics, option: str = "QuantConfig(clips={!r})") -> str | None:
    """Return what is wrong with a tensor and what to try, or None."""
    if statistics.clipped_share > LARGEST_CLIPPED_SHARE:
        return (
            f"{statistics.clipped_share:.1%} of its values are clipped (clip"
            f" {statistics.clip:.4g}), which is too small. If it learns, try a lower learning rate"
            f" or {option.format('absmax')}; if it follows the values, they grew within a few steps"
        )
    if statistics.bits == 8 and statistics.largest_code <= SMALLEST_CODE:
        return (
            f"its largest code is {statistics.largest_code} of 127, fewer than 4 bits (clip"
            f" {statistics.clip:.4g}), which is too large. If it follows the values, one of them is"
            f" far beyond the others, and {option.format('learned')} clips it; if it learns, try a"
            " higher learning rate"
        )
    return None


class Signals:
    """Collects, logs and summarises signals of a training; `last` has the signals of `last_step`.

    Args:
        model: the model itself, without data parallel wrappers.
        interval: steps between two collections; the first step is collected, too.
        folder: TensorBoard's files are written to its folder "lsq"; None: no files.
        step, option: the word for a step in messages, and the option that a complaint suggests.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        interval: int,
        folder: str | None = None,
        step: str = "step",
        option: str = "QuantConfig(clips={!r})",
    ):
        self.model, self.interval, self.folder = model, interval, folder
        self.clips = dict(quantized_tensors(model))
        self.last: dict[str, TensorStatistics] = {}
        self.last_step = 0
        self._step, self._option = step, option
        self._warned: set[str] = set()
        self._writer = None

    @contextmanager
    def observing(self, step: int) -> Iterator[None]:
        """Collect signals in this context if they are due in `step` (from 1), once a step."""
        due = self.clips and (step == 1 or step % self.interval == 0) and self.last_step != step
        if due:
            self.last_step = step
            with observe(self.model) as self.last:
                yield
        else:
            yield

    def record(self, step: int, factor: float | Tensor = 1.0) -> None:
        """Log complaints and write files if `step` was collected; `factor` scales gradients."""
        if self.last_step != step:
            return
        for name, statistics in self.last.items():
            text = complaint(statistics, self._option)
            if text and name not in self._warned:
                self._warned.add(name)
                logger.warning("%s, %s %d: %s", name, self._step, step, text)
        if self.folder is not None:
            self._write(step, factor)

    def figures(self, *, every_tensor: bool) -> dict[str, float]:
        """Summarise the last signals; `every_tensor`: add those of each tensor."""
        figures = {}
        for kind in ("weight", "activation"):
            tensors = [one for one in self.last.values() if one.kind == kind]
            if tensors:
                figures[f"lsq/{kind}_clip"] = sum(one.clip for one in tensors) / len(tensors)
                for share in ("clipped_share", "zero_share"):
                    figures[f"lsq/{kind}_{share}"] = max(getattr(one, share) for one in tensors)
        if every_tensor:
            for name, one in self.last.items():
                figures |= {f"lsq/{figure}/{name}": getattr(one, figure) for figure in FIGURES}
        return figures

    def summary(self) -> str:
        """Format the last signals, with one row for the same tensor of all layers."""
        if not self.last:
            return ""
        rows: dict[str, list[TensorStatistics]] = {}
        for name, statistics in self.last.items():
            rows.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(statistics)
        width = max(map(len, rows))
        return "\n".join(
            [
                f"Quantised tensors at {self._step} {self.last_step}; rows with * span several"
                " layers",
                f"{'tensor':{width}} {'kind':10} {'clip':>17} {'clipped':>8} {'zero':>8}"
                f" {'largest code':>12}",
                *(f"{name:{width}} {_row(tensors)}" for name, tensors in rows.items()),
                f"{len(self._warned)} of {len(self.clips)} tensors were warned of",
            ]
        )

    def finish(self) -> None:
        if self.last:
            logger.info(self.summary())
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, step: int, factor: float | Tensor) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(os.path.join(self.folder, "lsq"), purge_step=step)
        for name, statistics in self.last.items():
            for figure in FIGURES:
                self._writer.add_scalar(f"{figure}/{name}", getattr(statistics, figure), step)
            gradient = self.clips[name].grad
            if gradient is not None:
                self._writer.add_scalar(f"clip_gradient/{name}", gradient.mean() * factor, step)
        self._writer.flush()


def _row(tensors: list[TensorStatistics]) -> str:
    clips = [one.clip for one in tensors]
    codes = [one.largest_code for one in tensors if one.largest_code is not None]
    return (
        f"{tensors[0].kind:10} {_span(clips, '.4g'):>17}"
        f" {max(one.clipped_share for one in tensors):8.3%}"
        f" {max(one.zero_share for one in tensors):8.2%} {_span(codes, 'd') if codes else '-':>12}"
    )


def _span(values: list, form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}..{high}"
