"""Trains a small translator with each scheme of rounding gradients, on the same data and seeds, and
compares them.

    python benchmarks/gradient_trainings.py TEXT OUTPUT [--updates N] [--seeds 1 2] [--schemes ...]

TEXT holds train.en, train.de, valid.*, test.*. Model and options are those of recipes/quality.
`float` rounds no gradient, `product` is backward="int8" as it is; the others are simulated
(gradient_backend.py). Run the same command
again to go on after an interruption: finished trainings are skipped.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import common
import torch
from gradient_backend import Rounding
from gradient_schemes import SCHEMES

from lsq.commands import cli
from lsq.run import backends

FLOAT, PRODUCT = "float", "product"
SIDES = [FLOAT, PRODUCT, *SCHEMES]
DEFAULT = [
    FLOAT,
    PRODUCT,
    "row, predicted",
    "1x128 and 128x1",
    "32x32",
    "128x128",
    "128x128, nearest",
    "tensor",
    "tensor, delayed by 16",
]
UNPLANNED = ["--lsq-memory", "naive"]
"""What gradient_backend.py asks for."""
QUICK = {
    "updates": 2,
    "hidden": 16,
    "vocabulary_size": 60,
    "max_tokens": 300,
    "max_length": 40,
    "warmup": 2,
}


def arguments(options: argparse.Namespace, backward: str) -> list[str]:
    """Options of `lsq train-text`, but for the run's own."""
    files = [
        word
        for split, option in (("train", ""), ("valid", "valid-"), ("test", "test-"))
        for side, language in (("src", "en"), ("tgt", "de"))
        for word in (f"--{option}{side}", str(options.text / f"{split}.{language}"))
    ]
    size = {
        "--output": options.output,
        "--vocabulary-size": options.vocabulary_size,
        "--layers": 2,
        "--hidden": options.hidden,
        "--feed-forward": 4 * options.hidden,
        "--heads": 4,
        "--dropout": 0.1,
        "--max-tokens": options.max_tokens,
        "--max-length": options.max_length,
        "--lr": 0.002,
        "--warmup": options.warmup,
        "--log-every": 25,
        "--updates": options.updates,
        "--validate-every": max(1, options.updates // 4),
        "--lsq-backward": backward,
    }
    return [*files, "--cpu", "--quiet", *(str(word) for pair in size.items() for word in pair)]


def run_lsq(words: list[str]) -> None:
    """Run a command of lsq in this process; after a mistake, which it has told, the process ends
    with its status."""
    status = cli.main(words)
    if status:
        sys.exit(status)


@contextlib.contextmanager
def computing_on(backend: backends.Backend | None) -> Iterator[None]:
    """Within this context layers on the CPU compute on `backend`; None: as ever."""
    usual = backends.for_device(torch.device("cpu"))
    before = backends.register("cpu", lambda device, activations: backend or usual)
    try:
        yield
    finally:
        backends.register("cpu", before)


def train(side: str, seed: int, options: argparse.Namespace) -> dict:
    """One training and its translation, or what is left of it: the content of its results.json."""
    name = f"{''.join(one if one.isalnum() else '-' for one in side)}-{seed}"
    backend = Rounding(SCHEMES[side](), seed) if side in SCHEMES else None
    given = arguments(options, "int8" if side == PRODUCT else "float")
    with computing_on(backend):
        run_lsq(["train-text", *given, "--name", name, "--seed", str(seed), "--", *UNPLANNED])
    return json.loads((options.output / name / "results.json").read_text(encoding="utf-8"))


def rows(found: dict[str, list[dict]]) -> Iterator[dict]:
    """One row for each side: validation loss and BLEU of each seed, and their means' differences to
    the first side."""
    baseline = next(iter(found.values()))

    def column(results: list[dict], key: str, form: str) -> tuple[str, float]:
        return " / ".join(format(one[key], form) for one in results), mean(
            one[key] for one in results
        )

    for side, results in found.items():
        row: dict = {"gradients": side}
        for key, form in (("best_validation_loss", ".4f"), ("bleu", ".2f")):
            row[key], level = column(results, key, form)
            row[f"{key}_difference"] = level - column(baseline, key, form)[1]
        yield row


def parser() -> argparse.ArgumentParser:
    """The command line, and with it the size of the model, which gradient_scales.py shares."""
    made = common.parser(__doc__)
    made.set_defaults(threads=1)
    made.add_argument(
        "text", type=Path, help="folder with train, valid and test files, .en and .de"
    )
    made.add_argument("output", type=Path, help="where everything is written")
    made.add_argument(
        "--updates", type=common.positive, default=1500, metavar="N", help="of each training"
    )
    made.add_argument(
        "--hidden", type=common.positive, default=128, metavar="N", help="hidden size"
    )
    made.add_argument(
        "--vocabulary-size", type=common.positive, default=4000, metavar="N", help="subwords"
    )
    made.add_argument(
        "--max-length",
        type=common.positive,
        default=256,
        metavar="N",
        help="longest sentence in pieces",
    )
    made.add_argument(
        "--max-tokens", type=common.positive, default=4096, metavar="N", help="tokens of a batch"
    )
    made.add_argument("--warmup", type=common.positive, default=400, metavar="N", help="updates")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; those of --quick are tiny."""
    options = common.parse(made)
    return argparse.Namespace(**vars(options) | QUICK) if options.quick else options


def main() -> None:
    made = parser()
    seeds = {"type": common.positive, "nargs": "+", "metavar": "SEED", "default": [1, 2]}
    made.add_argument(
        "--seeds", **seeds, help="of weights, order of batches, dropout, and rounding"
    )
    made.add_argument(
        "--schemes",
        nargs="+",
        choices=SIDES,
        default=DEFAULT,
        metavar="SCHEME",
        help=", ".join(SIDES),
    )
    options = parse(made)
    found: dict[str, list[dict]] = {side: [] for side in options.schemes}
    for seed in options.seeds:
        for side in options.schemes:
            found[side].append(train(side, seed, options))
    names = ("hidden", "updates", "max_tokens", "warmup", "vocabulary_size", "seeds")
    conditions = common.conditions(
        options, baseline=options.schemes[0], **{name: getattr(options, name) for name in names}
    )
    common.report("gradient_trainings", rows(found), conditions, options)


if __name__ == "__main__":
    main()
