"""Training steps of Hugging Face's models: PyTorch in bfloat16, int8 of torchao and SDNQ, lsq's
linears and layers.

GPT-2 small, a Llama with 110 million weights, BERT base and ViT-B/16, made from configurations, and
PyTorch's own encoder. With --lora all of them are frozen, and PEFT's adapters of their linear
layers train. A step is forward with labels, backward and AdamW (PyTorch's fused one; lsq's own
where parameters are float32), on one batch, in train mode. PyTorch's, torchao's and SDNQ's sides
take turns with one set of weights. A side that cannot run has a row with the reason.
"""

import argparse
import ctypes
import fnmatch
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import common
import torch
from matplotlib.figure import Figure
from model_sides import (
    HEADS,
    OPPONENTS,
    RECIPES,
    SIDES,
    Bases,
    Recipe,
    Side,
    is_conv1d,
    with_adapters,
)
from torch import nn

from lsq.commands.step_memory import saved_tensors
from lsq.memory import kept

COLOURS = {"PyTorch": "0.5", "torchao": "C1", "SDNQ": "C2", "lsq": "C0"}
"""By the first word of a side's name."""
PANELS = {
    "seconds": ("seconds a step", 1.0, ".2f"),
    "saved_bytes": ("megabytes kept for backward", 1e-6, ",.0f"),
}
"""Column -> its label, what it is multiplied by, and its format."""


def draw(rows: Sequence[Mapping], output: Path) -> None:
    """A row of panels for each figure, a panel for each model.

    Args:
        rows: of the table.
        output: the picture.

    Raises:
        ValueError: no side was measured.
    """
    ran = [row for row in rows if row["failed"] is None]
    if not ran:
        raise ValueError("a picture needs a side that ran; the rows say why none did")
    models = list(dict.fromkeys(row["model"] for row in ran))
    bars = max(sum(row["model"] == model for row in ran) for model in models)
    figure = Figure(figsize=(4.5 * len(models), 2 * (1 + 0.22 * bars)), layout="constrained")
    panels = figure.subplots(len(PANELS), len(models), squeeze=False)
    for line, (column, (label, factor, form)) in zip(panels, PANELS.items(), strict=True):
        for axes, model in zip(line, models, strict=True):
            chosen = {row["side"]: factor * row[column] for row in ran if row["model"] == model}
            places = range(len(chosen))
            colours = [COLOURS[name.split()[0]] for name in chosen]
            found = axes.barh(places, chosen.values(), color=colours)
            axes.bar_label(found, fmt=f"{{:{form}}}", padding=2, fontsize="small")
            axes.set_yticks(places, chosen, fontsize="small")
            axes.invert_yaxis()
            axes.set_xlabel(label)
            axes.set_title(model)
            axes.margins(x=0.15)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


LAYERS, TOKENS = 12, 2048
QUICK_LAYERS, QUICK_TOKENS = 1, 32
LONGEST_REASON = 200
FIGURES = (
    "seconds",
    "fastest",
    "processor_seconds",
    "ratio",
    "ratio_of_fastest",
    "ratio_of_processor",
)
FIGURES += (
    "saved_bytes",
    "saved_bytes_of_weights",
    "saved_ratio",
    "saved_ratio_of_batch",
    "peak_bytes",
    "first_pass",
)
FIGURES += ("loss", "failed")
"""Of a row; first_pass: seconds of the first forward and backward, in which a side is compiled;
loss: in that pass."""


def fitting(pattern: str) -> list[str]:
    """argparse type: the sides that a name or a pattern fits."""
    found = fnmatch.filter(SIDES, pattern)
    if not found:
        raise argparse.ArgumentTypeError(
            f"no side is called {pattern!r}; there are {', '.join(map(repr, SIDES))}"
        )
    return found


def measured(recipe: Recipe, wanted: list[str], options) -> tuple[list[dict], dict]:
    """The rows of one model, and a description of it."""
    torch.manual_seed(1)
    try:
        model = recipe.make(options.layers, options.quick).train()
        if options.lora:
            model = with_adapters(model, options.lora)
    except ImportError as error:
        return [row(recipe, name, failed=reason(error)) for name in wanted], {}
    length = recipe.quick_length if options.quick else recipe.length
    batch = recipe.batch(model, max(1, round(options.tokens / length)))
    bases, found, first, failed = Bases(model), {}, {}, {}
    for name in wanted:
        try:
            found[name], first[name] = first_pass(name, bases, batch, options.quick)
        except Exception as error:
            failed[name] = reason(error)
        print(
            f"{recipe.title}, {name}: {failed.get(name) or first[name]}",
            file=sys.stderr,
            flush=True,
        )
    clocks = {name: Clock(side.step) for name, side in found.items()}
    timings = common.alternate(clocks, rounds=options.rounds, warm_up=common.SETTLED)
    saved = {
        name: saved_tensors(side.loss, side.model.parameters()).total()
        for name, side in found.items()
    }
    of_weights = {name: saved_of_weights(side, saved[name]) for name, side in found.items()}
    strongest = min(
        timings.keys() & set(OPPONENTS), key=lambda name: timings[name].median, default=None
    )
    rows = [
        row(
            recipe,
            name,
            seconds=timing.median,
            fastest=timing.fastest,
            processor_seconds=clocks[name].median,
            saved_bytes=saved[name],
            saved_bytes_of_weights=of_weights[name],
            peak_bytes=peak_resident(found[name].step),
            **first[name],
            **(
                {}
                if strongest is None
                else beside(name, strongest, timings, clocks, saved, of_weights)
            ),
        )
        for name, timing in timings.items()
    ]
    torch.compiler.reset()
    return rows + [row(recipe, name, failed=why) for name, why in failed.items()], {
        "layers": options.layers,
        "batch": {name: list(value.shape) for name, value in batch.items()},
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "weights_of_linears": linear_weights(model),
        "strongest": strongest,
    }


class Clock:
    """Times a function by processor seconds, which hardly depend on what else runs."""

    def __init__(self, run: Callable[[], object]):
        self.run = run
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        self.run()
        self.seconds.append(time.process_time() - start)

    @property
    def median(self) -> float:
        """Seconds of all calls but the first, which is slower."""
        return statistics.median(self.seconds[1:])


def saved_of_weights(side: Side, whole: int) -> int:
    """The part of `whole` saved bytes that does not grow with the batch: copies of weights."""
    batch, count = side.batch, len(next(iter(side.batch.values())))
    if count == 1:
        return 0
    side.batch = {name: value[: count // 2] for name, value in batch.items()}
    half = saved_tensors(side.loss, side.model.parameters()).total()
    side.batch = batch
    return round((half * count - whole * (count // 2)) / (count - count // 2))


def beside(
    name: str, strongest: str, timings: dict, clocks: dict, saved: dict, of_weights: dict
) -> dict[str, float]:
    """A side's figures beside those of the fastest in bfloat16."""
    return {
        "ratio": timings[strongest].median / timings[name].median,
        "ratio_of_fastest": timings[strongest].fastest / timings[name].fastest,
        "ratio_of_processor": clocks[strongest].median / clocks[name].median,
        "saved_ratio": saved[name] / saved[strongest],
        "saved_ratio_of_batch": (saved[name] - of_weights[name])
        / (saved[strongest] - of_weights[strongest]),
    }


def first_pass(name: str, bases: Bases, batch: dict, quick: bool) -> tuple[Side, dict[str, float]]:
    """Make a side and take its first step, in which it is compiled; seconds of that pass and its
    loss.

    Losses of all sides are alike, as the weights are: an update changes them very little.
    """
    side = Side(SIDES[name], bases, batch, backend="eager" if quick else "inductor")
    losses = []
    seconds = common.seconds(lambda: losses.append(side.gradients()))
    side.update()
    return side, {"first_pass": seconds, "loss": losses[0]}


def row(recipe: Recipe, side: str, **figures) -> dict:
    """A row of the table; figures that are missing are None."""
    return {"model": recipe.title, "side": side, **{name: figures.get(name) for name in FIGURES}}


def reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:LONGEST_REASON]


def peak_resident(run: Callable[[], object]) -> int | None:
    """Bytes by which this process grows at most while `run` runs; None without Linux."""
    if platform.system() != "Linux":
        return None
    gc.collect()
    kept.release()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
    run()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Bytes of this process: now (VmRSS) or at most (VmHWM), as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def linear_weights(model: nn.Module) -> int:
    """How many weights the layers have that int8 sides multiply by (adapters left out)."""
    return sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module))
        and not name.endswith(HEADS)
        and "lora_" not in name
    )


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=RECIPES, default=list(RECIPES), help="these only"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        type=fitting,
        default=[list(SIDES)],
        metavar="NAME",
        help="these only; may have * in it",
    )
    parser.add_argument(
        "--layers", type=common.positive, default=LAYERS, metavar="N", help="of each model"
    )
    parser.add_argument(
        "--tokens", type=common.positive, default=TOKENS, metavar="N", help="a batch, about"
    )
    parser.add_argument(
        "--lora", type=common.positive, metavar="R", help="train adapters of this rank alone"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the bars")
    options = common.parse(parser, arguments)
    if options.quick:
        options.layers, options.tokens = QUICK_LAYERS, QUICK_TOKENS
    chosen = {name for names in options.sides for name in names}
    wanted = [name for name in SIDES if name in chosen]
    rows, models = [], {}
    for name in options.models:
        recipe = RECIPES[name]
        found, models[recipe.title] = measured(recipe, wanted, options)
        rows += found
    common.report(
        "models",
        rows,
        common.conditions(
            options,
            baseline="the fastest of PyTorch's sides in bfloat16, of each model",
            tokens=options.tokens,
            lora=options.lora,
            optimizer="torch.optim.AdamW(fused=True); lsq on float32 parameters: lsq.optim.Adam"
            " with weight decay",
            calibration="in the first pass only, which is not timed",
            packages=("transformers", "torchao", "sdnq", "openvino"),
        ),
        options,
        models=models,
    )
    if options.picture is not None:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
