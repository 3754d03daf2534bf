"""How exact the products of a backward pass are with each scheme of rounding gradients, during a
training.

    python benchmarks/gradient_scales.py TEXT OUTPUT [--at 1 100 400 1000]

Trains the translator of gradient_trainings.py, whose backward pass is in float32, and at some
updates rounds the gradient of each product by each scheme beside it. Prints signal-to-noise in dB
of the gradients of inputs (dX) and of weights (dW) against float64: their mean over the products,
and the worst; then the same of those products alone whose gradient is made by the end of another
product. The JSON has each product.
"""

import argparse
import math
from collections.abc import Iterator
from statistics import mean

import common
import torch
from gradient_backend import Showing
from gradient_schemes import SCHEMES, Codes, Place, Scheme, folded
from gradient_trainings import UNPLANNED, arguments, computing_on, parse, parser, run_lsq
from results_table import markdown_table
from torch import Tensor

from lsq.ops.weight_gradient import ProjectWeightGradient

KEPT = (1, 2)
"""Values of each row that stay floats beside the codes of the others, as the vocabulary's loss
keeps two."""


class Study:
    """Looks at the gradients of a training; `rows` has what it found.

    Args:
        updates: at which it measures, counted from 1; one batch each.
        seed: of the rounding.
    """

    def __init__(self, updates: list[int], seed: int):
        self.rows: list[dict] = []
        self._updates = set(updates)
        self._schemes = {name: make() for name, make in SCHEMES.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self._update = 0
        self._names: dict[int, str] = {}

    def begin(self, module: torch.nn.Module, inputs: tuple) -> None:
        """A hook before the forward pass of any module: counts the updates, and learns the names of
        the weights."""
        if getattr(module, "computes_loss", False) and module.training and torch.is_grad_enabled():
            self._update += 1
            self._names = {tensor.data_ptr(): name for name, tensor in module.named_parameters()}

    @torch.no_grad()
    def show(self, operation: ProjectWeightGradient, place: Place) -> None:
        """Measure, or remember, the gradient [M, N] that this operation reads."""
        weight = operation.weight
        if not operation.floats.any():
            return  # neither signal nor noise
        gradient = operation.floats * weight.scale
        if self._update not in self._updates:
            for scheme in self._schemes.values():
                scheme.watch(gradient, place)
            return
        codes = weight.codes.double()
        x = operation.x.coded.decode()
        exact = (
            gradient.double() @ codes,
            gradient.double().t() @ x.double() / weight.scale[:, None],
        )
        for name, scheme, kept in self._cases():
            floats = largest_of_rows(gradient, kept)
            found = self._products(scheme, gradient - floats, place, codes, x)
            floats = floats.double()
            found = (
                found[0] + floats @ codes,
                (found[1] + floats.t() @ x.double()) / weight.scale[:, None],
            )
            dx, dw = (decibels(*pair) for pair in zip(exact, found, strict=True))
            where = {"update": self._update, "weight": self._names[weight.values.data_ptr()]}
            self.rows.append(
                {**where, "follows": place.follows, "scheme": name, "dx": dx, "dw": dw}
            )

    def _cases(self) -> Iterator[tuple[str, Scheme, int]]:
        """(name, scheme, how many values of each row stay floats)."""
        for name, scheme in self._schemes.items():
            yield name, scheme, 0
        row = next(iter(self._schemes.values()))
        for kept in KEPT:
            yield f"row, {kept} of each kept", row, kept

    def _products(self, scheme: Scheme, gradient: Tensor, place: Place, codes: Tensor, x: Tensor):
        """dX and dW from the rounded gradient, in float64."""
        first, second = scheme.round(gradient, place, self._generator)
        if scheme.folded:
            x = folded(x, second.scale, self._generator)
            second = Codes(second.codes, torch.ones(1))
        return first.values.double() @ codes, second.values.double().t() @ x.double()


def largest_of_rows(gradient: Tensor, count: int) -> Tensor:
    """The values of largest magnitude of each row [M, N], 0 elsewhere."""
    places = gradient.abs().topk(count, dim=1).indices
    return torch.zeros_like(gradient).scatter(1, places, gradient.gather(1, places))


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal-to-noise; infinite where they are equal."""
    noise = (found - exact).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(exact.square().sum().item() / noise)


def summary(rows: list[dict]) -> Iterator[dict]:
    """One row for each scheme: "mean (worst)" over the products at each update, of dX and of dW."""
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        line = {"scheme": scheme}
        for key in ("dx", "dw"):
            for update in dict.fromkeys(row["update"] for row in rows):
                values = [
                    row[key] for row in rows if row["scheme"] == scheme and row["update"] == update
                ]
                line[f"{key} at {update}"] = f"{mean(values):.1f} ({min(values):.1f})"
        yield line


def study(options: argparse.Namespace) -> list[dict]:
    """Train, and return the rows of the study."""
    words = arguments(options, "float")
    run_lsq(["train-text", *words, "--prepare-only"])
    # fairseq sets up logging where nobody has before it is imported
    from lsq.commands import (
        train_text,
    )

    given = train_text.parser().parse_args(words)
    training = train_text.run_options(given, UNPLANNED).arguments(
        options.output / "data", options.output / "unused"
    )
    found = Study(options.at, given.seed)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(found.begin)
    try:
        with computing_on(Showing(found.show)):
            run_lsq(["train", *training, "--no-save", "--disable-validation", "--no-progress-bar"])
    finally:
        hook.remove()
    return found.rows


def main() -> None:
    made = parser()
    made.description = __doc__.partition("\n")[0]
    at = {
        "type": common.positive,
        "nargs": "+",
        "metavar": "UPDATE",
        "default": [1, 100, 400, 1000],
    }
    made.add_argument("--at", **at, help="where to measure; the training ends with the last one")
    options = parse(made)
    options.updates = max(options.at)
    rows = study(options)
    names = ("hidden", "max_tokens", "max_length", "warmup", "vocabulary_size", "at")
    conditions = common.conditions(
        options, baseline="float64", **{name: getattr(options, name) for name in names}
    )
    tables = {
        "all products": rows,
        "those of gradients that a product makes": [row for row in rows if row["follows"]],
    }
    for title, found in tables.items():
        print("\n".join([f"{title}:", "", *markdown_table(list(summary(found))), ""]))
    common.report("gradient_scales", list(summary(rows)), conditions, options, products=rows)


if __name__ == "__main__":
    main()
