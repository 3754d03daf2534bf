"""Training signals: what the quantisers of a model do while it trains.

Every few updates, for each quantised tensor: its clip, the share of values that are clipped, the
share of codes that are 0 and the gradient of the clip (means over the channels of a weight). They
go to TensorBoard; a tensor that looks unhealthy is warned of once; a table at the end shows the
last values.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lsq.layers import TensorStatistics, observe, quantized_tensors
from lsq.layers.signals import complaint

logger = logging.getLogger(__name__)

OPTION = "--lsq-clip-init {}"
"""What a complaint tells to try."""


class TrainingSignals:
    """Collects, logs and summarises the signals of one training run.

    Args:
        model: the model itself, without data parallel wrappers.
        interval: updates between two collections; the first update is collected as well.
        folder: where TensorBoard's files go, under "lsq"; None writes none.
    """

    def __init__(self, model: nn.Module, *, interval: int, folder: str | None = None):
        self.model, self.interval, self.folder = model, interval, folder
        self.clips = dict(quantized_tensors(model))
        self.last: dict[str, TensorStatistics] = {}
        self.last_update = 0
        self._warned: set[str] = set()
        self._writer = None

    @contextmanager
    def observing(self, update: int) -> Iterator[None]:
        """Around a forward and backward pass of update number `update`, which counts from 1.

        Only the first pass of an update is observed, and only in updates whose signals are wanted.
        """
        if (
            self.clips
            and (update == 1 or update % self.interval == 0)
            and self.last_update != update
        ):
            self.last_update = update
            with observe(self.model) as self.last:
                yield
        else:
            yield

    def record(self, update: int, factor: float | Tensor = 1.0) -> None:
        """Once the gradients of update number `update` are there, before the optimizer uses them
        times `factor`."""
        if self.last_update == update:
            self._warn(update)
            if self.folder is not None:
                self._write(update, factor)

    def summary(self) -> str:
        """The last signals as a table, one row for the same tensor of all layers; "" before the
        first."""
        if not self.last:
            return ""
        rows: dict[str, list[TensorStatistics]] = {}
        for name, statistics in self.last.items():
            rows.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(statistics)
        width = max(map(len, rows))
        lines = [
            f"Quantised tensors at update {self.last_update}; rows with * span several layers",
            f"{'tensor':{width}} {'kind':10} {'clip':>17} {'clipped':>8} {'zero':>8}"
            f" {'largest code':>12}",
        ]
        lines += [f"{name:{width}} {_row(found)}" for name, found in rows.items()]
        lines.append(f"{len(self._warned)} of {len(self.clips)} tensors were warned of")
        return "\n".join(lines)

    def finish(self) -> None:
        """Log the summary and close TensorBoard's file."""
        if self.last:
            logger.info(self.summary())
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _warn(self, update: int) -> None:
        for name, statistics in self.last.items():
            text = complaint(statistics, OPTION)
            if text and name not in self._warned:
                self._warned.add(name)
                logger.warning("%s, update %d: %s", name, update, text)

    def _write(self, update: int, factor: float | Tensor) -> None:
        if self._writer is None:
            # takes a second to import: only where it is wanted
            from torch.utils.tensorboard import (
                SummaryWriter,
            )

            self._writer = SummaryWriter(os.path.join(self.folder, "lsq"), purge_step=update)
        for name, statistics in self.last.items():
            self._writer.add_scalar(f"clip/{name}", statistics.clip, update)
            self._writer.add_scalar(f"clipped_share/{name}", statistics.clipped_share, update)
            self._writer.add_scalar(f"zero_share/{name}", statistics.zero_share, update)
            gradient = self.clips[name].grad
            if gradient is not None:
                self._writer.add_scalar(f"clip_gradient/{name}", gradient.mean() * factor, update)
        self._writer.flush()


def _row(found: list[TensorStatistics]) -> str:
    """The rest of a line: the range of clips and codes, the largest shares."""
    clips = [statistics.clip for statistics in found]
    codes = [statistics.largest_code for statistics in found if statistics.largest_code is not None]
    return (
        f"{found[0].kind:10} {_span(clips, '.4g'):>17} {max(s.clipped_share for s in found):8.3%} "
        f"{max(s.zero_share for s in found):8.2%} {_span(codes, 'd') if codes else '-':>12}"
    )


def _span(values: list, form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}..{high}"
