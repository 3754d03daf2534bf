"""Trains small models of transformers in float and in int8, over several seeds, and compares what
they learn.

The sides differ in nothing but what `lsq.convert` does: the same weights to begin with, batches,
AdamW of PyTorch and learning rates. Each training is a file in OUTPUT, and is not run again while
its options are the same.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common
import torch
from quality_picture import draw
from quality_tasks import Digits, Llama, Size, Task, Text, Translation
from torch import nn
from tqdm import tqdm

import lsq
from lsq.config import QuantConfig
from lsq.files import write_text
from lsq.observe import quantized_tensors
from lsq.text.numbers import write_numbers

SIZES = {
    "text": Size(
        layers=4,
        hidden=128,
        heads=4,
        feed_forward=512,
        length=128,
        batch=8,
        updates=800,
        warmup=80,
        learning_rate=2e-3,
        weight_decay=0.1,
    ),
    "llama": Size(
        layers=4,
        hidden=128,
        heads=4,
        feed_forward=384,
        length=128,
        batch=8,
        updates=800,
        warmup=80,
        learning_rate=2e-3,
        weight_decay=0.1,
    ),
    "digits": Size(
        layers=4,
        hidden=128,
        heads=4,
        feed_forward=512,
        length=17,
        batch=64,
        updates=400,
        warmup=40,
        learning_rate=1e-3,
        weight_decay=0.1,
    ),
    "translation": Size(
        layers=2,
        hidden=128,
        heads=4,
        feed_forward=512,
        length=32,
        batch=1024,
        updates=600,
        warmup=120,
        learning_rate=2e-3,
        weight_decay=0.01,
    ),
}
QUICK = {
    "layers": 2,
    "hidden": 64,
    "heads": 2,
    "feed_forward": 128,
    "length": 24,
    "updates": 3,
    "warmup": 1,
}
QUICK_BATCH = {"text": 2, "llama": 2, "digits": 8, "translation": 96}
SUBWORDS, QUICK_SUBWORDS = 4000, 100
NUMBERS, QUICK_NUMBERS = (20_000, 500), (200, 20)
"""Pairs of the built-in task for training, and for testing."""
FLOAT = "float32"
VALIDATIONS = 8
"""In a training, the last one included."""
GRADIENT_NORM = 1.0
NUDGE = 1e-6
"""By how much the weights of a second float training differ, relative to their size."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """How a model is trained."""

    convert: Callable[[nn.Module], object] = lambda model: None
    autocast: bool = False
    decays_clips: bool = False


def nudge(model: nn.Module) -> None:
    """Multiply all weights by 1 + NUDGE: how far apart do two float trainings end?"""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + NUDGE)


SIDES = {
    FLOAT: Side(),
    "float32, other last bits": Side(convert=nudge),
    "bfloat16": Side(autocast=True),
    "int8": Side(convert=lsq.convert),
    "int8, learned clips": Side(convert=partial(lsq.convert, quant=QuantConfig(clips="learned"))),
    "int8, gradients in floats": Side(
        convert=partial(lsq.convert, quant=QuantConfig(backward="float"))
    ),
    "int8, linears alone": Side(convert=partial(lsq.convert, fused=False)),
    "fused layers in floats": Side(convert=partial(lsq.convert, quant=QuantConfig(mode="float"))),
    "int8, activations in floats": Side(
        convert=partial(lsq.convert, quant=QuantConfig(activation_format="float32"))
    ),
    "int8, clips decay": Side(convert=lsq.convert, decays_clips=True),
}
DEFAULT = (FLOAT, "bfloat16", "int8")


def task_of(options: argparse.Namespace) -> Task:
    """The task with its data.

    Raises:
        ValueError, OSError: a file is too short, or cannot be read.
    """
    size = SIZES[options.task]
    if options.quick:
        size = dataclasses.replace(size, **QUICK, batch=QUICK_BATCH[options.task])
    if options.updates is not None:
        size = dataclasses.replace(size, updates=options.updates)
    if options.task in ("text", "llama"):
        return (Text if options.task == "text" else Llama)(size, options.text)
    if options.task == "digits":
        return Digits(size)
    pairs, languages = options.pairs, ("en", "de")
    if pairs is None:
        pairs, languages = options.output / "numbers", ("src", "tgt")
        pairs.mkdir(exist_ok=True)
        write_numbers(pairs, *(QUICK_NUMBERS if options.quick else NUMBERS), seed=1)
    subwords = QUICK_SUBWORDS if options.pairs is None else SUBWORDS
    return Translation(size, pairs, languages, subwords, options.output / f"subwords-{pairs.name}")


def train(task: Task, side: Side, seed: int, say: str) -> dict:
    """One training: scores at the end, losses of every update, what was validated on the way,
    clips."""
    torch.manual_seed(seed)
    size, model = task.size, task.model()
    report = side.convert(model)
    optimizer = torch.optim.AdamW(groups(model, side, size.weight_decay), lr=size.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, size))
    cast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=side.autocast)
    losses, validated, spent = [], [], 0.0
    every = max(1, size.updates // VALIDATIONS)
    progress = tqdm(
        zip(range(1, size.updates + 1), task.batches(seed), strict=False),
        say,
        size.updates,
        leave=False,
    )
    for update, batch in progress:
        begun = time.process_time()
        with cast():
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        spent += time.process_time() - begun
        if update % every == 0 or update == size.updates:
            with torch.no_grad(), cast():
                validated.append([update, task.scores(model.eval(), last=update == size.updates)])
            model.train()
            progress.set_postfix(validated[-1][1])
    return {
        "scores": validated[-1][1],
        "losses": losses,
        "validated": validated,
        "processor_seconds": spent,
        "converted": str(report) if report else None,
        "clips": {name: clip.mean().item() for name, clip in quantized_tensors(model)},
    }


def groups(model: nn.Module, side: Side, weight_decay: float) -> list[dict]:
    """Matrices decay, and nothing else does, unless clips shall."""
    clips = {id(clip) for _, clip in quantized_tensors(model)} if side.decays_clips else set()
    every = list(model.parameters())
    decay = [one for one in every if one.dim() > 1 or id(one) in clips]
    chosen = set(map(id, decay))
    keep = [one for one in every if id(one) not in chosen]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


def rate(size: Size, update: int) -> float:
    """Of the learning rate: rises to it, and falls in a straight line to a tenth."""
    falls = (update - size.warmup) / max(1, size.updates - size.warmup)
    return min((update + 1) / size.warmup, 1 - 0.9 * max(0.0, falls))


def result(task: Task, side: str, seed: int, options: argparse.Namespace) -> dict:
    """Of one training, now or before."""
    path = options.output / f"{task.name}-{side.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    settings = {
        "task": task.name,
        "side": side,
        "seed": seed,
        "size": dataclasses.asdict(task.size),
        "lsq": lsq.__version__,
        "data": str(options.pairs if task.name == "translation" else options.text),
    }
    if path.exists() and (known := json.loads(path.read_text()))["settings"] == settings:
        return known
    found = {
        "settings": settings,
        **train(task, SIDES[side], seed, f"{task.name}, {side}, seed {seed}"),
    }
    write_text(path, json.dumps(found))
    return found


def scores_of(found: dict) -> dict[str, float]:
    """Return a training's scores at the end and the mean loss of the last fifth of its updates."""
    losses = found["losses"]
    return {
        **found["scores"],
        "training loss": statistics.mean(losses[-max(1, len(losses) // 5) :]),
    }


def rows(found: dict[str, list[dict]]) -> Iterator[dict]:
    """One for each side and score: of every seed, their mean and spread, and how far the mean is
    from the first side's.

    The spread is the standard deviation of seeds; the error is the standard error of the
    difference, paired by seed.
    """
    scores = {side: [scores_of(one) for one in results] for side, results in found.items()}
    baseline = next(iter(scores.values()))
    for side, results in found.items():
        for score in scores[side][0]:
            values = [one[score] for one in scores[side]]
            apart = [value - one[score] for value, one in zip(values, baseline, strict=True)]
            yield {
                "side": side,
                "score": score,
                "seeds": " / ".join(f"{value:.3f}" for value in values),
                "mean": statistics.mean(values),
                "spread": statistics.stdev(values) if len(values) > 1 else None,
                "difference": statistics.mean(apart),
                "error": statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
                "processor_seconds": statistics.mean(one["processor_seconds"] for one in results),
            }


def curves(found: dict[str, list[dict]]) -> Iterator[dict]:
    """What is drawn: of each side and seed the losses of updates, and validations."""
    for results in found.values():
        for one in results:
            settings = one["settings"]
            yield {
                "side": settings["side"],
                "seed": settings["seed"],
                "losses": [round(loss, 4) for loss in one["losses"]],
                "validated": one["validated"],
            }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "task", choices=SIZES, help="models of text, ViT on digits, or Marian on pairs"
    )
    parser.add_argument("output", type=Path, help="folder of all trainings")
    seeds: dict = {"type": common.positive, "nargs": "+", "metavar": "SEED", "default": [1, 2, 3]}
    parser.add_argument(
        "--seeds", **seeds, help="of weights, order of batches, dropout, and rounding"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=DEFAULT, metavar="SIDE", help=", ".join(SIDES)
    )
    parser.add_argument("--updates", type=common.positive, metavar="N", help="of each training")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="of the task text; Python's manual if left out"
    )
    parser.add_argument(
        "--pairs",
        type=Path,
        metavar="FOLDER",
        help="of the task translation: train, valid and test files, .en and .de; names of numbers"
        " if left out",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw losses there")
    options = common.parse(parser, arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    task = task_of(options)
    found: dict[str, list[dict]] = {side: [] for side in options.sides}
    for seed in options.seeds:
        for side in options.sides:
            found[side].append(result(task, side, seed, options))
    conditions = common.conditions(
        options,
        packages=("transformers",),
        baseline=options.sides[0],
        task=task.name,
        seeds=options.seeds,
        size=dataclasses.asdict(task.size),
    )
    drawn = list(curves(found))
    common.report("model_quality", rows(found), conditions, options, curves=drawn)
    if options.picture is not None:
        draw({task.name: drawn}, options.picture)


if __name__ == "__main__":
    main()
