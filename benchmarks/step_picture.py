"""Draws where the time of a training step on a CPU goes, beside what its processor and memory allow
and other sides.

    python benchmarks/step_picture.py benchmarks/results/step_cpu_xeon_amx_2cores.json docs/step.png

`bench_step.py --picture FILE.png` measures and draws in one go.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from limits import PARTS, REST, UPDATE
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SIDE = "lsq int8, backward int8"
"""Whose step is drawn in parts."""
OTHERS = "fairseq", "pytorch"
"""How the names of the sides begin that it is drawn beside."""
COLOURS = {part: f"C{number}" for number, part in enumerate((*PARTS, UPDATE))} | {REST: "0.7"}
ALLOWED = "at the peak of processor\nand memory"
LEAST_LABELLED = 0.03
"""Of the longest bar: a shorter part has no figure in it."""


def draw(
    rows: Sequence[Mapping],
    parts: Mapping[str, Mapping[str, float]],
    limits: Mapping | None,
    output: Path,
) -> None:
    """Two panels: steps of all sides, and lsq's in parts beside what is allowed.

    Args:
        rows: of bench_step.py.
        parts: side -> part -> seconds.
        limits: what limits.measured returned.
        output: the picture.

    Raises:
        ValueError: the side that is drawn was not measured, or no limits.
    """
    if SIDE not in parts or limits is None:
        raise ValueError(
            f"a picture needs the side {SIDE!r} and the limits of a processor with VNNI or AMX;"
            " measure again with "
            "bench_step.py on such a one"
        )
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    seconds = {row["side"]: row["seconds"] for row in rows if row["side"].startswith(OTHERS)}
    names = [*seconds, SIDE]
    left.bar(range(len(seconds)), seconds.values(), color="0.5", width=0.7)
    _stack(left, len(seconds), parts[SIDE])
    longest = max(seconds.values())
    for place, value in enumerate([*seconds.values(), sum(parts[SIDE].values())]):
        left.text(place, value + longest / 100, f"{value:.2f}", ha="center", va="bottom")
    left.set_xticks(range(len(names)), [_in_lines(name) for name in names], fontsize="small")
    left.set_ylabel("seconds a step")
    for place, each in enumerate((parts[SIDE], limits["seconds"])):
        _stack(right, place, each, labelled=LEAST_LABELLED * sum(parts[SIDE].values()))
        total = sum(each.values())
        right.text(place, total * 1.005, f"{total:.2f}", ha="center", va="bottom")
    right.set_xticks(range(2), [_in_lines(SIDE), ALLOWED], fontsize="small")
    handles, labels = right.get_legend_handles_labels()
    pairs = dict(zip(labels, handles, strict=True))
    right.legend(reversed(pairs.values()), reversed(pairs), fontsize="small", loc="upper right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


def _stack(
    axes: Axes, place: int, parts: Mapping[str, float], labelled: float | None = None
) -> None:
    """One bar; with figures in those parts of it that take at least `labelled` seconds."""
    bottom = 0.0
    for part, colour in COLOURS.items():
        axes.bar(place, parts[part], bottom=bottom, color=colour, width=0.7, label=part)
        if labelled is not None and parts[part] >= labelled:
            middle = bottom + parts[part] / 2
            axes.text(
                place,
                middle,
                f"{parts[part]:.3f}",
                ha="center",
                va="center",
                fontsize="small",
                color="white",
            )
        bottom += parts[part]


def _in_lines(name: str) -> str:
    """The name of a side, a word or two a line."""
    return (
        name.replace(", ", ",\n")
        .replace(" bfloat16 ", "\nbfloat16\n")
        .replace("fairseq ", "fairseq\n")
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument(
        "figures", type=Path, metavar="FILE.json", help="what bench_step.py --json wrote"
    )
    options.add_argument("picture", type=Path, metavar="FILE.png", help="what to draw")
    given = options.parse_args()
    figures = json.loads(given.figures.read_text())
    draw(figures["rows"], figures.get("parts", {}), figures.get("limits"), given.picture)


if __name__ == "__main__":
    main()
