"""What a pass costs the host: layers so tiny that Python's time is nearly all there is, on the CPU
and for a GPU.

For a GPU the driver is a stub whose launches do nothing. `--beside FOLDER` measures another
checkout of lsq, with its libraries built, in turn with this one. Times are of one thread of the
processor, not of the clock on the wall.
"""

import itertools
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import common
import host_work

HERE = Path(__file__).resolve().parents[1]
OPERATIONS = {"training, planned memory": 19, "training, fresh memory": 19, "decoding": 13}
"""Of one pass of a layer on the CPU; an evaluation has 8."""


class Worker:
    """A process that works with the lsq of a checkout."""

    def __init__(self, checkout: Path, *sizes: int):
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "benchmarks" / "host_work.py"), *map(str, sizes)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(checkout)},
        )

    def seconds(self, backend: str, work: str) -> float:
        """Of doing it once more.

        Raises:
            RuntimeError: the process has failed; it has said why.
        """
        self._process.stdin.write(f"{backend}: {work}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args)} has ended")
        return float(line)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()


def measured(
    workers: dict[str, Worker], backend: str, work: str, rounds: int
) -> dict[str, list[float]]:
    """Side -> seconds of the first time, and of each round; all sides in turn."""
    found = {side: [] for side in workers}
    for _ in range(1 + rounds):
        for side, worker in workers.items():
            found[side].append(worker.seconds(backend, work))
    return found


def rows_of(backend: str, work: str, options, found: dict[str, list[float]]) -> list[dict]:
    """A row for each side of what `measured` found."""
    passes = options.layers * (options.words if work == "decoding" else 1)
    fastest = {side: min(seconds[1:]) for side, seconds in found.items()}
    return [
        {
            "backend": backend,
            "work": work,
            "side": side,
            "microseconds_per_pass": 1e6 * common.timing(rest).median / passes,
            "fastest": 1e6 * fastest[side] / passes,
            "first": 1e6 * first / passes,
            "per_operation": 1e6 * fastest[side] / passes / OPERATIONS.get(work, 8),
            "ratio": fastest.get("beside", fastest[side]) / fastest[side],
        }
        for side, (first, *rest) in found.items()
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=common.positive, default=6, metavar="N", help="layers")
    parser.add_argument(
        "--words", type=common.positive, default=16, metavar="N", help="words of a sentence"
    )
    parser.add_argument(
        "--work", nargs="+", choices=host_work.WORK, default=list(host_work.WORK), help="only these"
    )
    parser.add_argument(
        "--beside", type=Path, metavar="FOLDER", help="another checkout of lsq, the baseline"
    )
    options = common.parse(parser)
    if options.quick:
        options.layers, options.words, options.work = 1, 3, options.work[-2:]
    checkouts = {"this": HERE, **({"beside": options.beside.resolve()} if options.beside else {})}
    rows = []
    with ExitStack() as stack:
        sizes = options.layers, options.words
        workers = {
            side: stack.enter_context(Worker(path, *sizes)) for side, path in checkouts.items()
        }
        for backend, work in itertools.product(("cpu", "cuda"), options.work):
            rows += rows_of(
                backend, work, options, measured(workers, backend, work, options.rounds)
            )
    conditions = common.conditions(
        options,
        baseline="the fastest run of the checkout beside",
        layers=options.layers,
        words=options.words,
        driver="stub: launches do nothing",
        time="of one thread of the processor",
    )
    common.report("host", rows, conditions, options)


if __name__ == "__main__":
    main()
