"""What benchmarks on a GPU share: where they run, how they time, what their figures depend on, and
tables of results.

    python benchmarks/gpu.py step.json gemm.json [--output results.md]

Events time a captured graph of many launches, so that what the host takes to launch them does not
count. Launches that follow one another work on different copies of their tensors, together several
times the L2 cache, so that each finds its operands in device memory. Sides take turns; a figure is
the median of the rounds. In the emulator, which only shows that a benchmark runs, the host's clock
times plain calls.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import common
import torch

from lsq.gemm.cublaslt import first_candidate
from lsq.native import compiler
from lsq.native.device import Device
from lsq.run import cuda

CPU, CUDA, EMULATOR = "cpu", "cuda", "emulator"
ROTATION = 4
"""Copies of the tensors take this many times the L2 cache, together."""
COPIES = 256
"""Most copies of the tensors, and"""
COPIES_BYTES = 4 * 2**30
"""the bytes that they may take together."""
GRAPH_SECONDS = 1e-3
"""A graph lasts about this long, so that starting it counts for little."""
GRAPH_LAUNCHES = 4096
"""Most calls in a graph."""
WARM_UP = 3
"""Replays of each graph before the rounds: clocks rise, caches and tables are filled."""
LARGE_COPY = 2**30
"""Bytes read by the copy that shows the memory's bandwidth, and as many written."""
LOST = 77
"""Exit status of a process whose GPU is lost."""
QUERY = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
)
QUERY += ("temperature.gpu",)
"""What nvidia-smi is asked: clocks in MHz, power in W, temperature in degrees."""


def add_options(parser: argparse.ArgumentParser, *devices: str) -> None:
    """--device, by default the first of `devices`, and --seconds."""
    parser.add_argument("--device", choices=devices, default=devices[0], help="where to run")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="begin no further measurement on a GPU after S seconds",
    )


def open_device(name: str) -> Device:
    """The GPU ("cuda") or the emulator, with cuBLASLt's first proposal for each product.

    Raises:
        RuntimeError: there is no GPU that can be used, or no C++ compiler for the emulator.
    """
    if name == EMULATOR:
        return cuda.emulated_device()
    return cuda.gpu(0, first_candidate)


def on_gpu(device: Device) -> bool:
    return device.torch_device.type == "cuda"


def copies(device: Device, moved: int, held: int) -> int:
    """How many copies of tensors to rotate among, by bytes that a call moves and holds."""
    if not on_gpu(device):
        return 2
    cache = torch.cuda.get_device_properties(device.torch_device).L2_cache_size
    wanted = math.ceil(ROTATION * cache / max(1, moved))
    return max(2, min(wanted, COPIES, COPIES_BYTES // max(1, held)))


def alternate(
    device: Device, sides: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int
) -> dict[str, common.Timing]:
    """Seconds per call of every side, measured in turn.

    Args:
        sides: name -> calls that do the same work on different tensors. They run once in this order
            before anything is measured, so that a side may read what an earlier one wrote.
        rounds: measurements of each side.

    Raises:
        RuntimeError: a launch failed, or cannot be captured.
    """
    for calls in sides.values():
        for call in calls:
            call()
    device.synchronize()
    if not on_gpu(device):
        timings = common.alternate(
            {name: lambda calls=calls: [call() for call in calls] for name, calls in sides.items()},
            rounds=rounds,
            warm_up=1,
        )
        return {name: _divided(timing, len(sides[name])) for name, timing in timings.items()}
    measured: dict[str, list[float]] = {name: [] for name in sides}
    with device.captures_in_turn():
        graphs = {name: _Graph(calls) for name, calls in sides.items()}
        for number in range(WARM_UP + rounds):
            for name, graph in graphs.items():
                seconds = graph.seconds()
                if number >= WARM_UP:
                    measured[name].append(seconds)
    return {name: common.timing(values) for name, values in measured.items()}


def _divided(timing: common.Timing, calls: int) -> common.Timing:
    return common.Timing(median=timing.median / calls, fastest=timing.fastest / calls)


class _Graph:
    """Calls captured in a CUDA graph, repeated until it lasts about GRAPH_SECONDS."""

    def __init__(self, calls: Sequence[Callable[[], object]]):
        self._capture(calls, 1)
        self.seconds()
        lasted = self.seconds() * len(calls)
        passes = min(math.ceil(GRAPH_SECONDS / lasted), max(1, GRAPH_LAUNCHES // len(calls)))
        if passes > 1:
            self._capture(calls, passes)

    def _capture(self, calls: Sequence[Callable[[], object]], passes: int) -> None:
        self._calls = passes * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(passes):
                for call in calls:
                    call()

    def seconds(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / self._calls


def copy_sides(device: Device, moved: int, count: int) -> dict[str, list[Callable[[], object]]]:
    """Two ways to move `moved` bytes, half of them read and half written: the device's own copy,
    and a kernel's.

    Small copies by the device's own engine can be slow in a graph: whoever compares takes the
    faster of the two.
    """
    words = 2 * max(1, moved // 32)
    shape, bounds = (count, words), (-(2**61), 2**61)
    source = torch.randint(*bounds, shape, dtype=torch.int64, device=device.torch_device)
    target = torch.empty_like(source)
    pairs = list(zip(source, target, strict=True))
    return {
        "copy": [lambda s=s, t=t: t.copy_(s) for s, t in pairs],
        "copy by a kernel": [lambda s=s, t=t: torch.bitwise_not(s, out=t) for s, t in pairs],
    }


def copy_bandwidth(device: Device, rounds: int) -> float:
    """Gigabytes per second that a large copy on the device moves, bytes read and written."""
    moved = 2 * LARGE_COPY if on_gpu(device) else 2**16
    return (
        1e-9 * moved / fastest_copy(alternate(device, copy_sides(device, moved, 2), rounds=rounds))
    )


def fastest_copy(timings: Mapping[str, common.Timing]) -> float:
    """Median seconds of the faster of `copy_sides`' sides."""
    return min(timing.median for name, timing in timings.items() if name.startswith("copy"))


def conditions(device: Device, **more) -> dict:
    """Conditions on a device; ask for them just after measuring, while its clocks are up."""
    libraries = {
        "driver_supports": ".".join(map(str, device.driver.version)),
        "torch": torch.version.cuda,
        "nvrtc": _nvrtc_version(),
        "cublaslt": device.products.library.version(),
    }
    if on_gpu(device):
        return {**hardware(device.torch_device), "cuda": libraries, **more}
    meaning = "times in the emulator say nothing about a GPU"
    return {"device": device.name, "meaning": meaning, "cuda": libraries, **more}


def hardware(place: torch.device) -> dict:
    properties = torch.cuda.get_device_properties(place)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gibibytes": round(properties.total_memory / 2**30, 1),
        "l2_megabytes": round(1e-6 * properties.L2_cache_size, 1),
        "nvidia_smi": nvidia_smi(),
    }


def _nvrtc_version() -> str | None:
    try:
        return compiler.version()
    except RuntimeError:
        return None


def nvidia_smi() -> dict[str, str] | str:
    """The answers to QUERY for the first GPU, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer: {error}"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return f"no answer: {(done.stdout + done.stderr).strip()}"
    return dict(zip(QUERY, map(str.strip, lines[0].split(",")), strict=False))


class OutOfTime(RuntimeError):
    """The process was asked to end."""


class Survey:
    """Measures one thing after another, until the time is up; a failure is kept and does not end
    it.

    SIGTERM, which `timeout` sends, ends what is being measured and begins nothing more; what was
    found can be reported.
    A failure that has lost the GPU ends the process: everything else would fail as well.

    Args:
        seconds: how long to begin further measurements, None: to the end.
        keep: called whenever something was found, or was lost, to write what there is.
    """

    def __init__(
        self, seconds: float | None, keep: Callable[["Survey"], None] = lambda survey: None
    ):
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._keep = keep
        self.rows: list[dict] = []
        self.more: dict[str, list[dict]] = {}
        """Further tables, by their names."""
        self.failed: dict[str, str] = {}
        """What was measured in vain -> why."""
        self.left_out: list[str] = []
        """What there was no time for."""

    def measure(self, items: Iterable[tuple[str, Callable[[], Iterator[dict]]]]) -> None:
        """Collect rows from each (name, function)."""
        before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            for name, rows in items:
                self._measure(name, rows)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _measure(self, name: str, rows: Callable[[], Iterator[dict]]) -> None:
        if time.monotonic() > self._end:
            self.left_out.append(name)
            return
        try:
            for row in rows():
                self.rows.append(row)
                self._keep(self)
            self._keep(self)
        except OutOfTime:
            self.left_out.append(name)
        except Exception as error:  # whatever it is, the time on a GPU goes to the others
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Keep a failure, and end the process if it has lost the GPU."""
        why = lost()
        self.failed[name] = f"{type(error).__name__}: {error}" + (
            f"; lost the GPU: {why}" if why else ""
        )
        print(f"{name} failed: {self.failed[name]}", file=sys.stderr, flush=True)
        self._keep(self)
        if why:
            os._exit(LOST)

    def _terminate(self, *_) -> None:
        self._end = -math.inf
        raise OutOfTime


def lost() -> str | None:
    """Why the GPU takes no more work of this process: a fault of a kernel stays.

    None: it does, or there is none.
    """
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def survey(
    name: str, conditions: Mapping, options: argparse.Namespace, **more: list[dict]
) -> Survey:
    """A survey that writes what it finds to the file of --json; `more`: further tables."""

    def keep(found: Survey) -> None:
        common.keep(
            name,
            found.rows,
            conditions,
            options,
            failed=found.failed,
            left_out=found.left_out,
            **found.more,
        )

    made = Survey(options.seconds, keep)
    made.more |= more
    return made


def report(name: str, survey: Survey, conditions: Mapping, options: argparse.Namespace) -> int:
    """Print and keep a survey, see common.report; the exit status, 1 after any failure."""
    found = {"failed": survey.failed, "left_out": survey.left_out, **survey.more}
    common.report(name, survey.rows, conditions, options, **found)
    return int(bool(survey.failed) or not survey.rows)


HEADLINE = (
    "device",
    "multiprocessors",
    "nvidia_smi",
    "cuda",
    "copy_gigabytes_per_second",
    "versions",
    "baseline",
)
HEADLINE += ("shapes", "shape", "dtypes")
"""Conditions that stand above a table, where there are any."""


def load(paths: Iterable[Path]) -> list[dict]:
    """Every result of the files.

    Raises:
        ValueError: a line is not the JSON object of a benchmark.
    """
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                result = json.loads(line)
                found.append(
                    {key: result[key] for key in ("benchmark", "conditions", "rows")} | result
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not the JSON object of a benchmark ({error!r})"
                ) from error
    return found


def markdown(result: Mapping) -> str:
    """Heading, conditions, table, and what failed or was left out."""
    conditions = result["conditions"]
    lines = [f"## {result['benchmark']}, {conditions['device']}", ""]
    lines += [
        f"* {key}: {common.plain(conditions[key])}" for key in HEADLINE if conditions.get(key)
    ]
    lines += ["", *markdown_table(result["rows"])]
    if "kernels" in result:
        lines += ["", *markdown_table(result["kernels"])]
    lines += [
        f"* failed: {what}: {why.splitlines()[0]}" for what, why in result.get("failed", {}).items()
    ]
    lines += [f"* left out, no time: {what}" for what in result.get("left_out", ())]
    return "\n".join(lines) + "\n"


def markdown_table(rows: list[Mapping]) -> list[str]:
    """Lines of a table; none without rows."""
    if not rows:
        return ["No rows."]
    body = [[common.cell(value).replace("|", "\\|") for value in row.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (list(rows[0]), ["---"] * len(rows[0]), *body)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE", help="lines of JSON")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the Markdown to FILE, print nothing of it",
    )
    options = parser.parse_args(arguments)
    results = load(options.results)
    text = "\n".join(map(markdown, results))
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
