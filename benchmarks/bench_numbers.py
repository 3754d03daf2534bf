"""The built-in task of number names on a device, from nothing to translations: `lsq numbers`, float
first, then int8.

It is the smoke test of a device as well: on a GPU the int8 translator must get 95 % of the numbers
right that it has not seen, else the exit status is 1.
"""

import json
import logging
import re
import sys
import tempfile
import time
from pathlib import Path

import common
import gpu
import torch

from lsq.commands import numbers

GOAL = 95.0
"""Percent of numbers that are translated exactly."""
UPDATES = 600
"""Three times the default of `lsq numbers`, at which int8 gets 85 to 96 % right, depending on the
seed."""
TINY = (
    "--updates 2 --train-pairs 200 --test-pairs 4 --hidden 32 --feed-forward 64 --layers 1"
    " --max-tokens 300"
).split()
TRANSLATED = re.compile(r"Translated .* ([\d.]+) tokens/s\)")
"""fairseq-generate's last words."""


def rows(folder: Path) -> list[dict]:
    """One row for each training in a folder of `lsq numbers`; `ratio`: of seconds an update."""
    runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    baseline = runs["float"]["seconds_an_update"]
    return [
        {
            "side": name,
            "exact_match": run["exact_match"],
            "chrf": run["chrf"],
            "validation_loss": run["best_validation_loss"],
            "updates": run["updates"],
            "training_seconds": run["training_seconds"],
            "milliseconds_an_update": 1e3 * run["seconds_an_update"],
            "peak_megabytes": 1e-6 * run["peak_bytes"],
            "decoded_tokens_per_second": decoded(folder / name / "translation" / "generate.log"),
            "ratio": baseline / run["seconds_an_update"],
        }
        for name, run in runs.items()
    ]


def decoded(log: Path) -> float | None:
    """Tokens a second of the translation, by fairseq's log; None: it does not say."""
    found = TRANSLATED.findall(log.read_text(encoding="utf-8"))
    return float(found[-1]) if found else None


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--device", choices=(gpu.CPU, gpu.CUDA, gpu.EMULATOR), default=gpu.CPU, help="where to run"
    )
    options = common.parse(parser, arguments)
    logging.disable(logging.INFO)  # fairseq lets everyone log everything
    size = TINY if options.quick else ["--updates", str(UPDATES)]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = [
            "--output",
            folder,
            "--threads",
            str(options.threads),
            "--lsq-device",
            options.device,
            "--quiet",
        ]
        numbers.run([*given, *size])
        found = rows(Path(folder))
    conditions = common.conditions(
        options,
        **(
            gpu.hardware(torch.device("cuda", 0))
            if options.device == gpu.CUDA
            else {"device": options.device}
        ),
        packages=("fairseq-fixed",),
        seconds=round(time.monotonic() - begun, 1),
        arguments=" ".join(size),
        baseline="float: fairseq's transformer in float32",
    )
    common.report("numbers", found, conditions, options)
    reached = found[-1]["exact_match"]
    if options.device == gpu.CUDA and not options.quick and reached < GOAL:
        print(
            f"int8 translates {reached} % of the numbers exactly; the goal is {GOAL} %",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
