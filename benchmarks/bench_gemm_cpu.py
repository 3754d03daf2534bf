"""The int8 products of a file of tuned products, tuned against untuned and against float32.

Every entry is run in the same process in three ways, in turn: as the file says ("tuned"), as it
runs without a file ("default"), and as torch.mm in float32. Operations that round their sums do so
in both integer ways. "ratio" is the default's time over the tuned one's; it is 1 where the file
keeps the default, which then is not timed twice. A class is an operation; its figure is the
geometric mean of its ratios.
"""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import common
from tqdm import tqdm

from lsq.gemm import configuration_file, lookup
from lsq.gemm.configuration import CpuConfiguration, Entry, Times
from lsq.gemm.configuration_file import ConfigurationFile
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuner.cpu import CpuTrial

QUICK = [
    ProductKey(op="project", m=8, n=32, k=16),
    ProductKey(op="project_weight_gradient", m=16, n=32, k=8),
]


def rows_of(entry: Entry, cache: int | None, rounds: int) -> dict:
    """The row of the table for one entry."""
    trial = CpuTrial(entry.key, cache)
    untuned = CpuConfiguration.default(entry.key)
    sides = {
        "tuned": lambda repeats: trial.seconds(entry.configuration, repeats),
        "float32": trial.float_seconds,
    }
    if entry.configuration != untuned:
        sides["default"] = lambda repeats: trial.seconds(untuned, repeats)
    repeats = {}
    for _ in range(2):
        for name, seconds in sides.items():
            repeats[name] = max(1, int(common.MINIMUM_SECONDS / seconds(1)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(sides):
            times[name].append(sides[name](repeats[name]))
    tuned, float32 = (statistics.median(times[name]) for name in ("tuned", "float32"))
    default = statistics.median(times.get("default", times["tuned"]))
    key = entry.key
    return {
        "class": key.op,
        "m": key.m,
        "n": key.n,
        "k": key.k,
        "configuration": str(entry.configuration),
        "tuned_milliseconds": 1e3 * tuned,
        "default_milliseconds": 1e3 * default,
        "float32_milliseconds": 1e3 * float32,
        "giga_operations_per_second": 1e-9 * key.arithmetic / tuned,
        "ratio": default / tuned,
        "ratio_to_float32": float32 / tuned,
    }


def classes(table: list[dict]) -> Iterator[dict]:
    """The figures of each class, and of all together."""
    for name in [*dict.fromkeys(row["class"] for row in table), "all"]:
        ratios = {
            key: [row[key] for row in table if name in (row["class"], "all")]
            for key in ("ratio", "ratio_to_float32")
        }
        yield {
            "class": name,
            "products": len(ratios["ratio"]),
            "ratio": math.exp(statistics.fmean(map(math.log, ratios["ratio"]))),
            "minimum": min(ratios["ratio"]),
            "maximum": max(ratios["ratio"]),
            "ratio_to_float32": math.exp(
                statistics.fmean(map(math.log, ratios["ratio_to_float32"]))
            ),
        }


def quick_file() -> ConfigurationFile:
    """Two small products, tuned as they run untuned."""
    entries = [
        Entry(
            key=key,
            configuration=CpuConfiguration.default(key),
            times=Times(chosen=1, default=1, float=1),
            spread=0,
            date="2026-01-01T00:00:00Z",
        )
        for key in QUICK
    ]
    return ConfigurationFile(validators=lookup.table().here, entries=tuple(entries))


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--file", type=Path, help="of tuned products; by default the entries that are in use here"
    )
    parser.add_argument(
        "--every", type=common.positive, default=1, metavar="N", help="only every Nth entry"
    )
    options = common.parse(parser, arguments)
    if options.file is not None:
        lookup.set_files([options.file])  # refuses the file of another device
        file = configuration_file.read(options.file)
    else:
        file = quick_file() if options.quick else lookup.table().file
    entries = file.entries[:: options.every]
    if not entries:
        raise SystemExit(
            "no product is tuned for this CPU and this number of threads; run `lsq tune` first"
        )
    cache = 2**10 if options.quick else None
    table = [
        rows_of(entry, cache, options.rounds) for entry in tqdm(entries, disable=None, leave=False)
    ]
    figures = list(classes(table))
    print(common.table(figures), end="\n\n")
    common.report(
        "gemm_cpu",
        table,
        common.conditions(options, baseline="the same product untuned", dtypes=["int8", "float32"]),
        options,
        classes=figures,
    )


if __name__ == "__main__":
    main()
