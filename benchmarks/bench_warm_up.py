"""The first passes of a training: what finding clips costs while tensors grow.

GPT-2 and Llama of a few layers, after lsq.convert, trained from scratch by AdamW on random words. A
pass is forward with labels and backward; the sides train copies of one model, and take turns.
"absmax" is the default, whose clips follow the largest magnitudes. The others learn clips: "near"
measures them again and again, near those before, "anew" makes the whole search every time, "once"
measures in the first pass only. How far the clips of "near" are from those of a whole search on the
same weights stands beside them. "growth" is the mean of the first hundred passes over the median of
later ones.
"""

import argparse
import contextlib
import copy
import statistics
import sys
from collections.abc import Iterator

import common
import torch
from huggingface_models import RECIPES, Recipe
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers.module import ProgramModule
from lsq.layers.schedule import WEIGHTS_AT
from lsq.ops.calibration import Calibration


class MeasuredOnce(QuantConfig):
    calibration_passes = 1


MODELS = "gpt2", "llama"
ONCE, ABSMAX, NEAR, ANEW = SIDES = "once", "absmax", "near", "anew"
QUANT = {
    ONCE: MeasuredOnce(clips="learned"),
    ABSMAX: QuantConfig(clips="absmax"),
    NEAR: QuantConfig(clips="learned"),
    ANEW: QuantConfig(clips="learned"),
}
EARLY = 100
"""Passes that are compared with those after them."""
PASSES, QUICK_PASSES = 120, 5
TOKENS, QUICK_TOKENS = 2048, 32
LEARNING_RATE = 1e-3


@contextlib.contextmanager
def whole_searches() -> Iterator[None]:
    """Within this context no search begins at a clip of before."""
    measure = Calibration.measure
    Calibration.measure = lambda self, *given, again=False, **options: measure(
        self, *given, **options
    )
    try:
        yield
    finally:
        Calibration.measure = measure


class Side:
    """A copy of the model in training."""

    def __init__(self, name: str, model: nn.Module, batch: dict[str, torch.Tensor]):
        self.model, self.batch = copy.deepcopy(model), batch
        lsq.convert(self.model, QUANT[name])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.around = whole_searches if name == ANEW else contextlib.nullcontext
        self.seconds: list[float] = []

    def step(self) -> None:
        """One pass, which is timed."""
        with self.around():
            self.seconds.append(common.seconds(lambda: self.model(**self.batch).loss.backward()))

    def update(self) -> None:
        """Not timed."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def apart(model: nn.Module) -> dict[str, float]:
    """How far the clips of its weights are from those of a whole search.

    Mean and largest relative difference, and by how much of itself the squared error over all
    weights is larger.
    """
    differences, error, least = [], 0.0, 0.0
    for module in filter(lambda one: isinstance(one, ProgramModule), model.modules()):
        for name, declared in module.declared.items():
            if declared.clip is None:
                continue
            weight, clip = module.own_parameter(name).data, module.own_parameter(declared.clip).data
            weight = (weight.t() if declared.in_out else weight).contiguous()
            anew, calibration = torch.empty_like(clip), Calibration(module.target)
            calibration.measure(name, weight, anew, "mse", QuantConfig().weights, per_channel=True)
            calibration.finish()
            differences.append((clip / anew - 1).abs())
            error, least = error + squared_error(weight, clip), least + squared_error(weight, anew)
    every = torch.cat(differences)
    return {"mean": every.mean().item(), "largest": every.max().item(), "error": error / least - 1}


def squared_error(weight: torch.Tensor, clip: torch.Tensor) -> float:
    """Of rounding a weight [N, K] under clips [N] to 8 bits."""
    scale = (clip / 127)[:, None]
    return ((weight / scale).clamp(-127, 127).round() * scale - weight).square().sum().item()


def trained(recipe: Recipe, options: argparse.Namespace) -> tuple[list[dict], dict]:
    """The rows of one model, and all of its figures: seconds of each pass, and `apart` after some
    of them."""
    torch.manual_seed(1)
    try:
        model = recipe.make(options.layers, options.quick).train()
    except ImportError as error:
        print(f"{recipe.title} is left out: {error}", file=sys.stderr)
        return [row(recipe, name) for name in SIDES], {}
    length = recipe.quick_length if options.quick else recipe.length
    batch = recipe.batch(model, max(1, round(options.tokens / length)))
    sides, compared = {name: Side(name, model, batch) for name in SIDES}, {}
    for number in range(options.passes):
        for side in sides.values():
            side.step()
        if number in WEIGHTS_AT and number.bit_count() == 1:
            compared[number] = apart(sides[NEAR].model)
        for side in sides.values():
            side.update()
    once = sum(sides[ONCE].seconds)
    rows = [row(recipe, name, side.seconds, once) for name, side in sides.items()]
    return rows, {
        "seconds": {name: side.seconds for name, side in sides.items()},
        "apart": compared,
    }


def row(
    recipe: Recipe, side: str, seconds: list[float] | None = None, once: float | None = None
) -> dict:
    """Of one side: all seconds, those of the first pass, medians of later ones that measure learned
    clips of weights and do not, and what early passes take of later ones.
    """
    found = dict.fromkeys(("seconds", "first", "measuring", "others", "growth", "ratio"))
    if seconds:
        # from 0, as schedules count
        measuring = [one for number, one in enumerate(seconds) if number in WEIGHTS_AT]
        others = [one for number, one in enumerate(seconds) if number and number not in WEIGHTS_AT]
        found |= {
            "seconds": sum(seconds),
            "first": seconds[0],
            "measuring": median(measuring),
            "others": median(others),
            "growth": statistics.mean(seconds[:EARLY]) / median(seconds[EARLY:])
            if seconds[EARLY:]
            else None,
            "ratio": once / sum(seconds),
        }
    return {"model": recipe.title, "side": side, **found}


def median(seconds: list[float]) -> float | None:
    """None of nothing."""
    return statistics.median(seconds) if seconds else None


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=MODELS,
        metavar="MODEL",
        help=", ".join(MODELS),
    )
    parser.add_argument("--layers", type=common.positive, default=2)
    parser.add_argument("--passes", type=common.positive, default=PASSES)
    parser.add_argument("--tokens", type=common.positive, default=TOKENS, help="of a batch")
    options = common.parse(parser, arguments)
    if options.quick:
        options.layers, options.passes, options.tokens = 1, QUICK_PASSES, QUICK_TOKENS
    found = {name: trained(RECIPES[name], options) for name in options.models}
    common.report(
        "warm_up",
        [row for rows, _ in found.values() for row in rows],
        common.conditions(
            options,
            baseline=ONCE,
            layers=options.layers,
            passes=options.passes,
            tokens=options.tokens,
            packages=("transformers",),
        ),
        options,
        models={name: figures for name, (_, figures) in found.items()},
    )


if __name__ == "__main__":
    main()
