"""Draws docs/gradients.png and docs/gradients-training.png from the results of the benchmarks of
gradient exchange."""

import argparse
import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "exact": "black",
    "exact, noisy": "C5",
    "float": "black",
    "copy": "0.75",
    "no exchange": "0.75",
    "bf16": "C7",
    "fp16": "C6",
    "gcq": "C3",
    "gcq, largest value as clip": "C1",
    "int8": "C0",
    "int8_hier": "C2",
    "int4_hier": "C4",
    "int4_hier, nodes of 1": "C9",
}
"""Of each side, the same in every panel."""
AFTER_STEPS = 60
"""Steps of training before the errors that are drawn."""
SMOOTH = 5
"""Neighbouring steps that a drawn training loss is the mean of."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks/results", help="folder of the figures"
    )
    options.add_argument(
        "--machine", default="cpu_zen5_2cores", help="suffix of figures that depend on the machine"
    )
    options.add_argument(
        "--output", type=Path, default=ROOT / "docs", help="folder of the pictures"
    )
    given = options.parse_args()

    def load(name: str) -> dict:
        return json.loads((given.results / f"{name}.json").read_text())

    simulated = load("gradients_simulated")
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    draw_errors(panels[0, 0], simulated["errors"])
    draw_bytes(panels[0, 1], load("gradients_wire")["rows"])
    draw_steps(panels[1, 0], load(f"network_{given.machine}")["rows"])
    draw_work(panels[1, 1], load(f"gradients_hook_{given.machine}")["rows"])
    figure.savefig(given.output / "gradients.png", dpi=110)

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 3)
    draw_processes(panels[0], load(f"gradients_training_{given.machine}"))
    draw_simulated(panels[1], simulated["trainings"], 32, "sentences")
    draw_simulated(panels[2], simulated["trainings"], 1024, "numbers")
    figure.savefig(given.output / "gradients-training.png", dpi=110)


def draw_errors(axes: Axes, errors: list[dict]) -> None:
    """Relative error of the mean against the number of workers."""
    chosen = [
        row for row in errors if (row["text"], row["after_steps"]) == ("numbers", AFTER_STEPS)
    ]
    found = sorted(chosen, key=lambda row: row["workers"])
    for scheme in ("bf16", "gcq", "int8", "int8_hier", "int4_hier"):
        points = [
            (row["workers"], row["errors"][scheme]) for row in found if scheme in row["errors"]
        ]
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            color=COLOURS[scheme],
            label=scheme,
        )
    axes.axhline(0.01, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [row["workers"] for row in found]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="workers, simulated", ylabel="relative error of the mean gradient")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="upper left")


def draw_bytes(axes: Axes, rows: list[dict]) -> None:
    """Bytes on a network card, of the larger cluster."""
    workers = max(row["workers"] for row in rows)
    chosen = {row["mode"]: row["card_bytes_per_value"] for row in rows if row["workers"] == workers}
    nodes = next(row["nodes"] for row in rows if row["workers"] == workers)
    bars(axes, chosen, "{:.2f}")
    axes.set(
        xlabel=f"bytes a parameter on a node's network card, {nodes} nodes of {workers // nodes}"
    )


def draw_steps(axes: Axes, rows: list[dict]) -> None:
    """Milliseconds of a step, by rate of the network; bars of one side beside one another."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    height = 0.8 / len(rates)
    sides = list(dict.fromkeys(row["side"] for row in rows))
    for number, rate in enumerate(rates):
        times = [row["milliseconds"] for row in rows if row["rate"] == rate]
        places = [place + (number - (len(rates) - 1) / 2) * height for place in range(len(sides))]
        colours = [COLOURS[side] for side in sides]
        drawn = axes.barh(places, times, height, color=colours, alpha=1 if number else 0.5)
        words = rate.replace("gbit", " Gb/s").replace("mbit", " Mb/s")
        axes.bar_label(
            drawn, [f"{time:,.0f} at {words}" for time in times], fontsize="x-small", padding=2
        )
    axes.set_yticks(range(len(sides)), sides)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="milliseconds a step, 4.2 million parameters, 2 nodes of 2 over gloo")


def draw_work(axes: Axes, rows: list[dict]) -> None:
    """A hook's own work, for the larger cluster."""
    workers = max(row["workers"] for row in rows)
    times = {
        row["side"]: row["microseconds_per_megabyte"] for row in rows if row["workers"] == workers
    }
    bars(axes, times, "{:,.0f}")
    axes.set(xlabel=f"microseconds of a hook's own work per MB of gradients, {workers} workers")


def bars(axes: Axes, values: dict[str, float], form: str) -> None:
    """One horizontal bar for each side, from top to bottom, with its value."""
    drawn = axes.barh(list(values), list(values.values()), color=[COLOURS[side] for side in values])
    axes.bar_label(
        drawn, [form.format(value) for value in values.values()], fontsize="small", padding=2
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)


def draw_processes(axes: Axes, results: dict) -> None:
    """Training losses of the larger set of processes, first seed."""
    processes = max(curve["processes"] for curve in results["curves"])
    for curve in results["curves"]:
        if curve["processes"] == processes and curve["side"] in COLOURS:
            draw_losses(axes, curve["side"], curve["seeds"][0]["training"])
    finish(axes, f"updates, {processes} processes over gloo, numbers")


def draw_simulated(axes: Axes, trainings: list[dict], workers: int, text: str) -> None:
    """Training losses of one number of simulated workers on one text, first seed."""
    chosen = [row for row in trainings if (row["workers"], row["text"]) == (workers, text)]
    seed = min(row["seed"] for row in chosen)
    for row in chosen:
        if row["seed"] == seed:
            draw_losses(axes, row["scheme"], row["losses"])
    finish(axes, f"updates, {workers:,} simulated workers, {text}")


def draw_losses(axes: Axes, side: str, losses: list[float]) -> None:
    """One curve; exact averaging is wide and pale beneath the others."""
    means = [sum(losses[end - SMOOTH : end]) / SMOOTH for end in range(SMOOTH, len(losses) + 1)]
    style = {"linewidth": 5, "alpha": 0.25, "zorder": 1} if side == "exact" else {"linewidth": 1.2}
    axes.plot(range(SMOOTH, len(losses) + 1), means, color=COLOURS[side], label=side, **style)


def finish(axes: Axes, label: str) -> None:
    """Labels, grid and legend of loss curves."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(
        [tick for tick in (0.5, 1, 2, 3, 4, 5) if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=label, ylabel="nats a byte, mean of all workers")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="x-small")


if __name__ == "__main__":
    main()
