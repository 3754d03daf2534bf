"""Starting a service: importing PyTorch, importing what lsq serves with, reading a base model until
it can translate.

Each start is a process of its own. "cold": the model's file is dropped from the system's cache
before; the libraries are not. "ratio" is what importing PyTorch takes over what this takes.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bench_decode
import common
import transformer

TORCH = "import torch"
STEPS = {TORCH: "torch", "import lsq": "lsq", "read the model": "model"}
"""What a start consists of, in order -> as it is called in START."""

START = """
import json, sys, time
path, threads = sys.argv[1], int(sys.argv[2])
laps = {}

def lap(name, since):
    laps[name] = [time.perf_counter() - since[0], time.process_time() - since[1]]
    return time.perf_counter(), time.process_time()

since = time.perf_counter(), time.process_time()
import torch
since = lap("torch", since)
import lsq, lsq.commands.serve, lsq.serving.http.service, lsq.serving.http.server
since = lap("lsq", since)
torch.set_num_threads(threads)
translator = lsq.Translator(path)
since = lap("model", since)
print(json.dumps(laps))
"""


def start(path: Path, threads: int, cold: bool) -> dict[str, list[float]]:
    """Wall and processor seconds of each step of one start."""
    if cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-c", START, str(path), str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rows(path: Path, options) -> Iterator[dict]:
    """Rows of the table: each step of a start, with the model's file in the cache and without."""
    caches = ("warm", "cold")
    start(path, options.threads, cold=False)
    found = {cache: [] for cache in caches}
    for _ in range(options.rounds):
        for cache in caches:
            found[cache].append(start(path, options.threads, cold=cache == "cold"))
    for cache in caches:
        measured = {name: [one[key][0] for one in found[cache]] for name, key in STEPS.items()}
        for name, key in STEPS.items():
            yield {
                "side": name,
                "cache": cache,
                "seconds": statistics.median(measured[name]),
                "fastest": min(measured[name]),
                "processor_seconds": statistics.median(one[key][1] for one in found[cache]),
                "ratio": statistics.median(measured[TORCH]) / statistics.median(measured[name]),
            }


def main(arguments: list[str] | None = None) -> None:
    options = common.parse(common.parser(__doc__), arguments)
    shape = transformer.QUICK if options.quick else transformer.Shape()
    with tempfile.TemporaryDirectory() as temporary:
        bench_decode.write_models(shape, Path(temporary) / "model")
        path = Path(temporary) / "model" / "int8"
        conditions = common.conditions(
            options,
            packages=("starlette", "uvicorn", "sentencepiece"),
            baseline=TORCH,
            shape=dataclasses.asdict(shape),
            bytes=path.stat().st_size,
        )
        common.report("start", list(rows(path, options)), conditions, options)


if __name__ == "__main__":
    main()
