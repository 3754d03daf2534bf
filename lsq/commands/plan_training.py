"""`lsq plan --model`: whether and how the full training of a model fits into a memory budget."""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lsq import extras
from lsq.commands.options import (
    SIZES,
    AnyPath,
    File,
    check_there,
    check_writable,
    command_parser,
    size,
)
from lsq.models.training_memory import KINDS, REUSED, WAYS, TrainingMemory, Way, training_memory

BATCH = re.compile(r"([1-9]\d{0,5})[x×]([1-9]\d{0,6})")
OF_OTHERS = {"float32 AdamW": 16, "bfloat16 AdamW": 8}
"""Bytes a parameter of weights, gradients and moments, without activations."""
WIDTH = 8
"""Characters of a number of gigabytes."""


def batch(text: str) -> tuple[int, int]:
    """Convert 4x2048 to (sequences, tokens of each)."""
    found = BATCH.fullmatch(text)
    if found is None:
        raise ArgumentTypeError(f"{text!r} is no batch; give sequences x tokens, as 4x2048")
    return int(found[1]), int(found[2])


class Options(Namespace):
    """Count the memory of a full training of a causal language model of transformers, for each way
    to train weights as codes, without making the model: it runs on shapes alone. Say which way fits
    into a budget. Memory of Python and its libraries, some 400 MB, is not counted."""

    model: AnyPath
    """a folder with config.json, or that file"""
    batch: Annotated[tuple, "BxT", batch]
    """sequences and tokens of each, as 4x2048"""
    budget: Annotated[float, "SIZE", size] | None = None
    """the most memory, as 24GB; else all ways are shown and none is chosen"""
    plot: File | None = None
    """draw the memory over the step (.png, .svg, .pdf)"""
    quiet: bool = False
    """no progress bar"""


def run(arguments: list[str]) -> int:
    """Print the ways, and draw one; 1: none fits into the budget."""
    given = command_parser("plan", Options).parse_args(arguments)
    check_there(given.model)
    if given.plot is not None:
        check_writable(given.plot, "--plot")
        if given.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {given.plot}: a picture is a .png, .svg or .pdf")
        extras.require("a picture", "study")
    config = _config(given.model, given.batch[1])
    found = [
        memory_of(config, given.batch, way)
        for way in tqdm(WAYS, desc="counting", disable=given.quiet or None, leave=False)
    ]
    fitting = [one for one in found if given.budget is None or one.peak <= given.budget]
    print(report(found, given))
    if given.budget is not None:
        print(advice(fitting[0]) if fitting else nothing(found, given.budget))
    if given.plot is not None:
        draw((fitting or found[-1:])[0], given.budget, given.plot)
    return 0 if fitting else 1


def _config(path: Path, tokens: int):
    """Read a configuration; ValueError: it is none, or allows no such sequences."""
    extras.require("a model's configuration", "huggingface")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} has no configuration of transformers: {first}") from error
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise ValueError(
            f"--batch has sequences of {tokens} tokens, and the model takes {most}; give shorter"
            " ones, or raise max_position_embeddings in the configuration"
        )
    config.use_cache = False
    return config


def memory_of(config, sizes: tuple[int, int], way: Way) -> TrainingMemory:
    """Count the memory of one way. Raises ValueError: the configuration is of no causal language
    model, or of one whose shapes depend on values."""
    from transformers import AutoModelForCausalLM

    def make() -> nn.Module:
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except ValueError as error:
            raise ValueError(
                f"a {config.model_type} is no causal language model of transformers, and"
                " others are not planned"
            ) from error

    def step(model: nn.Module) -> Tensor:
        words = torch.zeros(sizes, dtype=torch.int64, device="meta")
        return model(input_ids=words, labels=words).loss

    try:
        return training_memory(make, step, way)
    except RuntimeError as error:  # as of operations whose shapes depend on values
        raise ValueError(
            f"a step of a {config.model_type} does not run on shapes alone:"
            f" {str(error).splitlines()[0]}"
        ) from error


def report(found: Sequence[TrainingMemory], given: Namespace) -> str:
    parameters = found[0].parameters
    lines = [
        f"{parameters / 1e6:,.0f} million parameters, {given.batch[0]} x {given.batch[1]} tokens"
    ]
    width = max(len(str(one.way)) for one in found)
    for one in found:
        fits = "" if given.budget is None else "  fits" if one.peak <= given.budget else "  no"
        lines.append(f"{one.way!s:{width}}  {_size(one.peak, WIDTH)}{fits}")
    for name, each in OF_OTHERS.items():
        lines.append(f"{name:{width}}  {_size(each * parameters, WIDTH)}  without activations")
    return "\n".join(lines)


def advice(one: TrainingMemory) -> str:
    """Say what one way needs, and how to train so."""
    kinds = sorted(one.at_peak.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{kind} {_size(size)}" for kind, size in kinds if size > one.peak / 200)
    folder = '"FOLDER"' if one.way.offload else ""
    lines = [
        f"at the peak: {parts}",
        "to train so:",
        "  model = AutoModelForCausalLM.from_pretrained(",
        f"      FOLDER_OF_MODEL, quantization_config=LsqConfig(remainder={one.way.remainder}))",
        *[f"  checkpoint_layers(model{', ' * one.way.offload}{folder})"] * one.way.again,
        "  optimizer = Adam(model.parameters(), moment_bits=8).step_in_backward()"
        + f".offload({folder})" * one.way.offload,
    ]
    return "\n".join(lines)


def nothing(found: Sequence[TrainingMemory], budget: float) -> str:
    least = min(one.peak for one in found)
    return (
        f"nothing fits into {_size(budget)}; the least is {_size(least)}: take shorter or fewer"
        " sequences, and accumulate"
    )


def _size(count: float, width: int = 0) -> str:
    unit = "GB" if count >= SIZES["GB"] else "MB"
    return f"{count / SIZES[unit]:{width}.3f} {unit}"


def draw(one: TrainingMemory, budget: float | None, path: Path) -> None:
    """Draw the memory of a step by kind. Raises ValueError: the format is unknown; OSError: the
    picture cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    kinds = [*KINDS, REUSED]
    sizes = [[now.get(kind, 0) / 1e9 for now in one.timeline] for kind in kinds]
    shown = [number for number, values in enumerate(sizes) if max(values) > 0]
    axes.stackplot(
        range(len(one.timeline)),
        [sizes[number] for number in shown],
        labels=[kinds[number] for number in shown],
        linewidth=0,
    )
    if budget is not None:
        axes.axhline(budget / 1e9, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="allocation", ylabel="GB", xlim=(0, len(one.timeline) - 1), ylim=(0, None))
    axes.set_title(f"{one.way}: {one.peak / 1e9:.2f} GB at most")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    figure.savefig(path, dpi=150)
