"""The losses of a training, read from its run folder, and pictures of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

LOSSES = "losses.jsonl"
"""The file in the folder of a model."""


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


def draw_losses(curves: dict[str, LossCurve], path: Path, title: str) -> None:
    """Draw training (pale) and validation (with a dot at each) losses of named trainings into one PNG file."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        colour = f"C{number}"
        axes.plot(*_points(curve.training), color=colour, alpha=0.4, linewidth=1, label=f"{name}, training")
        axes.plot(*_points(curve.validation), color=colour, marker="o", markersize=3, label=f"{name}, validation")
    axes.set(title=title, xlabel="updates", ylabel="bits per target token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=120)


def _points(losses: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())
