"""What every benchmark shares: options, alternating timing, conditions, and the report.

A benchmark times several *sides*, functions that do the same work in different ways, in one process
and in turn, so that a change of clock or of load meets all of them. A figure is a median; a ratio
is the baseline's median divided by the side's (above 1: the side is faster). The fastest
measurement stands beside it: where the two are far apart, something else was running.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

import lsq
from lsq.native import tiles

MINIMUM_SECONDS = 0.01
"""A measurement repeats its side until it lasts about this long, so that the clock's own cost is
nothing."""

LONG_SECONDS = 0.5
"""A measurement longer than this is worth a line of progress."""

ENVIRONMENT_PREFIXES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "MALLOC_",
    "LD_PRELOAD",
    "CT2_",
)
"""Environment variables that change how fast torch or CTranslate2 runs; those that are set are
reported."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call of one side."""

    median: float
    fastest: float


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(
        description=description.strip().partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument(
        "--quick", action="store_true", help="tiny shapes: only checks that it runs"
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write the JSON object to FILE as well"
    )
    options.add_argument(
        "--threads",
        type=positive,
        default=torch.get_num_threads(),
        metavar="N",
        help="threads of each side",
    )
    options.add_argument(
        "--rounds", type=positive, default=7, metavar="N", help="measurements of each side"
    )
    return options


def positive(text: str) -> int:
    """argparse type: a whole number above 0."""
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def parse(
    options: argparse.ArgumentParser, arguments: list[str] | None = None
) -> argparse.Namespace:
    """Parse the command line, set the number of threads, seed torch."""
    chosen = options.parse_args(arguments)
    if chosen.quick:
        chosen.rounds = min(chosen.rounds, 2)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(1)
    return chosen


def ctranslate2() -> ModuleType:
    """The package.

    By oneDNN its sums of int8 saturate on AMD processors without VNNI, by MKL they do not.

    Raises:
        ImportError: it is not installed.
    """
    if not tiles.vectorised():
        os.environ.setdefault("CT2_USE_MKL", "1")
    import ctranslate2

    return ctranslate2


def alternate(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 2,
    synchronize: Callable | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, Timing]:
    """Time every side in turn, `rounds` times.

    Sides that take long say so on standard error as they go.

    Args:
        sides: name -> function without arguments.
        rounds: measurements of each side.
        warm_up: rounds before these, of one call each.
        synchronize: waits for a device, before and after each measurement.
        clock: in seconds; None: the wall's.
    """
    repeats = {}
    for _ in range(warm_up):
        for name, run in sides.items():
            repeats[name] = max(1, int(MINIMUM_SECONDS / seconds(run, 1, synchronize, clock)))
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1, rounds + 1):
        for name, run in sides.items():
            measured[name].append(seconds(run, repeats[name], synchronize, clock))
            if measured[name][-1] > LONG_SECONDS:
                print(
                    f"round {number} of {rounds}: {name} {measured[name][-1]:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return {name: timing(values) for name, values in measured.items()}


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    """The seconds that the processor gave this process, which hardly depend on what else runs; for
    several threads the wall's."""
    return time.process_time if options.threads == 1 else time.perf_counter


SETTLED = 9
"""Steps after which lsq measures no clip before it rounds any more."""


def settle(run: Callable[[], object]) -> None:
    """Call a pass that no optimizer follows so often, as if one stepped each time."""
    # layers count the steps of all
    anyone = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    for _ in range(SETTLED):
        run()
        anyone.step()


def timing(values: list[float]) -> Timing:
    return Timing(median=statistics.median(values), fastest=min(values))


def beside_a_copy(timings: Mapping[str, Timing], moved: int) -> Iterator[dict]:
    """Columns of each side's row; sides have "plain" and "copy"; `moved`: bytes in and out."""
    for side, timing in timings.items():
        yield {
            "side": side,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "gigabytes_per_second": 1e-9 * moved / timing.median,
            "ratio": timings["plain"].median / timing.median,
            "ratio_to_copy": timings["copy"].median / timing.median,
        }


def seconds(
    run: Callable[[], object],
    repeats: int = 1,
    synchronize: Callable | None = None,
    clock: Callable[[], float] | None = None,
) -> float:
    """Seconds a call over `repeats`, by `clock` (None: wall time); `synchronize` waits."""
    wait, clock = synchronize or (lambda: None), clock or time.perf_counter
    wait()
    start = clock()
    for _ in range(repeats):
        run()
    wait()
    return (clock() - start) / repeats


def conditions(options: argparse.Namespace, **more) -> dict:
    """Everything that a figure depends on; `more` adds what is particular to one benchmark.

    Packages named in `more["packages"]` are reported with their versions.
    """
    packages = ("torch", "numpy", *more.pop("packages", ()))
    return {
        "device": "cpu",
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "quick": options.quick,
        "load_average": round(os.getloadavg()[0], 2),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
        "versions": {
            "lsq": lsq.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        **more,
    }


def processor() -> str:
    """Name of the processor with family and model number, which virtual machines may hide."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = dict(
        reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line])
    )
    name = found.get("model name") or platform.processor() or platform.machine()
    numbers = ", ".join(f"{key} {found[key]}" for key in ("cpu family", "model") if key in found)
    return f"{name} ({numbers})" if numbers else name


def version(package: str) -> str | None:
    """Version of an installed package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def report(
    name: str, rows: Iterable[Mapping], conditions: Mapping, options: argparse.Namespace, **figures
):
    """Print the conditions and the rows as a table, then everything as one JSON object on the last
    line.

    Args:
        name: the benchmark's name.
        rows: flat dicts with the same keys in the same order, "ratio" among them.
        conditions: see `conditions`.
        options: the parsed options; with --json the object is written to that file, too.
        figures: further entries of the JSON object.
    """
    rows = list(rows)
    show(conditions)
    print(table(rows), end="\n\n")
    line = keep(name, rows, conditions, options, **figures)
    print(line)
    sys.stdout.flush()


def keep(
    name: str, rows: list[Mapping], conditions: Mapping, options: argparse.Namespace, **figures
) -> str:
    """Write the JSON object to the file of --json, all at once; the object."""
    line = json.dumps({"benchmark": name, "conditions": conditions, "rows": rows, **figures})
    if options.json is not None:
        partial = options.json.with_suffix(".partial")
        partial.write_text(line + "\n")
        partial.replace(options.json)
    return line


def show(conditions: Mapping) -> None:
    """Print the conditions, one a line."""
    for key, value in conditions.items():
        print(f"{key}: {plain(value)}")


def plain(value) -> str:
    """A condition as text on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    return str(value)


def table(rows: list[Mapping]) -> str:
    """`rows` as aligned text with a heading; numbers to the right, with four digits."""
    heading = list(rows[0]) if rows else []
    cells = [[cell(row[key]) for key in heading] for row in rows]
    widths = [
        max(len(line[column]) for line in [heading, *cells]) for column in range(len(heading))
    ]
    numeric = [all(not isinstance(row[key], str) for row in rows) for key in heading]

    def line(texts):
        aligned = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, numeric, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(heading), line("-" * width for width in widths), *map(line, cells)])


def cell(value) -> str:
    """A figure as text: four significant digits, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
