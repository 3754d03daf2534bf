"""BLEU and chrF by sacrebleu, and pictures of loss curves."""

from pathlib import Path

from matplotlib.figure import Figure
from sacrebleu.metrics import BLEU, CHRF

from lsq.commands.progress import LossCurve

TOKENIZERS = ("13a", "intl", "char", "zh", "none")
"""What BLEU counts as words; "char" or "zh" for text that has no spaces."""


def scores(hypotheses: list[str], references: list[str], tokenizer: str) -> dict[str, float | str]:
    """BLEU and chrF of a corpus in percent, each with sacrebleu's signature; `tokenizer` is one of TOKENIZERS."""
    found = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenizer)), ("chrf", CHRF())):
        found[name] = round(metric.corpus_score(hypotheses, [references]).score, 2)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found


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
