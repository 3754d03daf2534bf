"""The losses of a training, read from its run folder, and pictures of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from lsq import extras

LOSSES = "losses.jsonl"
"""The file in the folder of a model."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of one training: bits per target token, without label smoothing, by number of
    updates."""

    training: dict[int, float] = field(default_factory=dict)
    """Mean loss of the updates since the entry before, without label smoothing but with dropout."""
    validation: dict[int, float] = field(default_factory=dict)
    """Mean loss on the validation set, without label smoothing and dropout."""
    times: dict[int, float] = field(default_factory=dict)
    """Seconds spent in updates so far, in all sittings of a training that was resumed."""

    @property
    def seconds(self) -> float:
        """Time spent in all updates."""
        return max(self.times.values(), default=0.0)

    @property
    def updates(self) -> int:
        """Number of the last recorded update; 0 before the first."""
        return max([0, *self.training, *self.validation])


def read_losses(path: Path) -> LossCurve:
    """The curve in a file that `recording` wrote; empty where there is none.

    Where a training was resumed from before its last entry, the later entry of an update counts.
    Lines that are no entries, e.g. cut short by a full disk, are left out.
    """
    training, validation, times = {}, {}, {}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
            kind, update, spent = entry["kind"], int(entry["update"]), float(entry["seconds"])
            loss = float(entry["nll_loss"] if "nll_loss" in entry else entry["loss"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        (training if kind == "train" else validation)[update] = loss
        times[update] = spent
    return LossCurve(
        training=dict(sorted(training.items())),
        validation=dict(sorted(validation.items())),
        times=times,
    )


def draw_losses(curves: dict[str, LossCurve], path: Path, title: str) -> None:
    """Draw losses of named trainings over updates and over seconds into one PNG file.

    Those of training are pale, those of validation have a dot at each.
    """
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    by_update, by_second = figure.subplots(1, 2, sharey=True)
    for number, (name, curve) in enumerate(curves.items()):
        for axes, places in ((by_update, None), (by_second, curve.times)):
            for losses, label, style in (
                (curve.training, "training", {"alpha": 0.4, "linewidth": 1}),
                (curve.validation, "validation", {"marker": "o", "markersize": 3}),
            ):
                x = [update if places is None else places[update] for update in losses]
                axes.plot(
                    x, list(losses.values()), color=f"C{number}", label=f"{name}, {label}", **style
                )
    by_update.set(xlabel="updates", ylabel="bits per target token", ylim=(0, None))
    by_second.set(xlabel="seconds of training")
    for axes in (by_update, by_second):
        axes.grid(alpha=0.3)
    by_second.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=120)
