"""Memory plans: how far each method is above the lower bound, and how long it takes.

The instances are made here: lifetimes of training (every layer's saved values live from the forward
to the backward pass), guillotine cuts of a rectangle (the lower bound can be met, with nothing left
free), and random lives; files in MiniMalloc's format (id,lower,upper,size) can be added. `ratio` is
greedy_by_size's peak divided by the method's.
"""

import random
import statistics
import time
from pathlib import Path

import common

from lsq.memory.buffers import Buffer
from lsq.memory.files import read_buffers
from lsq.memory.planner import METHODS, plan
from lsq.native import loader

BASELINE = "greedy_by_size"


def training(layers: int, tokens: int, hidden: int, decoder: bool) -> list[Buffer]:
    """Forward and backward pass of an encoder, or of a decoder: int8 codes are saved, float32
    values pass by.

    Args:
        layers: number of layers.
        tokens: rows of every activation.
        hidden: its columns; a feed-forward block has four times as many.
        decoder: whether every layer has a third block, attention over a memory.
    """
    # projections of a layer, in units of `hidden`
    widths = [3, 1, 1, 4] + ([3, 1] if decoder else []) + [4, 1]
    count = 2 * layers * len(widths)  # operations; the second half is the backward pass
    buffers = []
    for operation in range(count // 2):
        mirrored, unit = count - 1 - operation, tokens * hidden * widths[operation % len(widths)]
        for name, size, first, last in (
            ("value", 4 * unit, operation, operation + 1),
            ("codes", unit, operation, mirrored),
            ("clipped", unit // 8, operation, mirrored),
            ("gradient", 4 * unit, mirrored, mirrored + 1),
            ("error", unit, mirrored, mirrored),
        ):
            buffers.append(Buffer(name=f"{name}{operation}", size=size, first=first, last=last))
    return buffers


def guillotine(count: int, seed: int) -> list[Buffer]:
    """`count` pieces of a rectangle of 2^20 bytes and 2^20 operations, cut again and again."""
    generator = random.Random(seed)
    pieces = [(0, 2**20, 0, 2**20)]
    while len(pieces) < count:
        left, right, bottom, top = pieces.pop(generator.randrange(len(pieces)))
        share = generator.uniform(0.2, 0.8)
        if generator.random() < 0.5 and right - left > 8:
            at = left + int((right - left) * share)
            pieces += [(left, at, bottom, top), (at, right, bottom, top)]
        elif top - bottom > 8:
            at = bottom + int((top - bottom) * share)
            pieces += [(left, right, bottom, at), (left, right, at, top)]
        else:
            pieces.append((left, right, bottom, top))
    return [
        Buffer(name=str(number), size=top - bottom, first=left, last=right - 1, alignment=1)
        for number, (left, right, bottom, top) in enumerate(pieces)
    ]


def random_lives(count: int, seed: int) -> list[Buffer]:
    """Sizes from 1 KiB to 64 MiB, mostly short lives."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        first = generator.randrange(count)
        last = first + int(generator.expovariate(1 / 50))
        found.append(
            Buffer(
                name=str(number), size=int(2 ** generator.uniform(10, 26)), first=first, last=last
            )
        )
    return found


def instances(quick: bool, files: list[Path]) -> dict[str, list[Buffer]]:
    """Name -> buffers."""
    if quick:
        made = {
            "training": training(2, 8, 64, False),
            "guillotine": guillotine(10, 1),
            "random": random_lives(50, 1),
        }
    else:
        made = {
            "encoder training": training(12, 4096, 768, False),
            "decoder training": training(12, 4096, 1024, True),
            "guillotine 30": guillotine(30, 1),
            "guillotine 100": guillotine(100, 1),
            "random 1000": random_lives(1000, 1),
            "random 20000": random_lives(20000, 1),
        }
    return {**made, **{path.stem: read_buffers(path) for path in files}}


def main(arguments: list[str] | None = None) -> None:
    options = common.parser(__doc__)
    options.add_argument(
        "files", type=Path, nargs="*", metavar="FILE.csv", help="further instances"
    )
    options.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds for exact"
    )
    chosen = common.parse(options, arguments)
    if chosen.quick:
        chosen.time_limit = 0.1
    methods = [method for method in METHODS if method != "exact" or loader.available()]
    rows = []
    for name, buffers in instances(chosen.quick, chosen.files).items():
        found = {method: measure(buffers, method, chosen) for method in methods}
        for method, (made, seconds) in found.items():
            rows.append(
                {
                    "instance": name,
                    "buffers": len(buffers),
                    "method": method,
                    "peak": made.peak,
                    "peak / bound": made.peak / max(1, made.lower_bound),
                    "milliseconds": 1000 * seconds,
                    "ratio": found[BASELINE][0].peak / max(1, made.peak),
                }
            )
    common.report(
        "planner",
        rows,
        common.conditions(
            chosen, baseline=BASELINE, library=loader.description(), time_limit=chosen.time_limit
        ),
        chosen,
    )


def measure(buffers: list[Buffer], method: str, chosen) -> tuple:
    """(the plan, median seconds); a search is run once."""
    seconds = []
    for _ in range(1 if method == "exact" else chosen.rounds):
        start = time.perf_counter()
        made = plan(buffers, method=method, time_limit=chosen.time_limit)
        seconds.append(time.perf_counter() - start)
    return made, statistics.median(seconds)


if __name__ == "__main__":
    main()
