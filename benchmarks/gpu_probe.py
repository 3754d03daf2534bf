"""Runs every kernel by itself on a GPU, compares it with its reference, and says of each: ok,
wrong, fault or hangs.

What runs are the cases of tests/ops/test_turns_cuda.py, which come to every loop of every kernel.
The host waits after each launch. A fault loses the GPU to its process, so cases run in a fork of
this one: where that ends or hangs, the kernel is named, and a new one begins with the next case.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
    "1"  # this process must leave the GPU alone: it cannot be forked then
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the tests

import common  # noqa: E402
import gpu  # noqa: E402
import torch  # noqa: E402

from lsq.native import compiler, device
from lsq.native.launch import Kernel, Launch
from lsq.native.launch_list import LaunchList
from lsq.run import cuda as backend
from tests.ops import cuda, test_turns_cuda  # noqa: E402
from tests.ops.turns import EXPORT  # noqa: E402

SILENCE = 30.0
"""Seconds without a word after which a process hangs; a kernel may be compiled meanwhile."""
FORK = multiprocessing.get_context("fork")
PLANTS = ("wrong", "fault", "hang")
OK, WRONG, FAULT, HANGS, MISSED = "ok", "wrong", "fault", "hangs", "not reached"


def cases(only: list[str] | None = None) -> list[Callable[[], None]]:
    """The test cases that launch kernels of these sources; None: of all."""
    return [
        run
        for run, sources in test_turns_cuda.SOURCES.items()
        if not only or set(sources) & set(only)
    ]


def kernels() -> set[Kernel]:
    """Every kernel that the probe launches, found without launching any."""
    found = set()

    class Listed:
        def __init__(self, on: device.Device, parts, products=None):
            found.update(
                one.kernel for part in parts for one in part.entries if isinstance(one, Launch)
            )

        def run(self) -> None:
            """Leave rubbish."""

    with (
        mock.patch.multiple(device, LaunchList=Listed),
        mock.patch.multiple(backend, LaunchList=Listed),
    ):
        for run in cases():
            # of what comes of rubbish
            with mock.patch.object(cuda, "check_results"), contextlib.suppress(Exception):
                run()
    return found


# The process that runs cases, and writes what it does to a pipe, an event a line


def send(event: str, what: str) -> None:
    """Tell the listening process."""
    os.write(OneByOne.pipe, (json.dumps([event, what]) + "\n").encode())


def name_of(entry) -> str:
    """The name of a launch's kernel, or of a product."""
    if not isinstance(entry, Launch):
        return "cuBLASLt"
    return entry.kernel.name + (" wgmma" if "WGMMA" in dict(entry.kernel.defines) else "")


class OneByOne:
    """A list of launches that runs one after another: each is reported before it and waited for.

    Plants: kernels that are to do something wrong, to try what is said of that.
    """

    pipe: int
    plants: dict[str, str] = {}

    def __init__(self, on: device.Device, parts, products=None):
        self._device, self._lists = on, []
        for part in parts:
            for entry in part.entries:
                send("load", name_of(entry))
                self._lists.append(
                    (name_of(entry), LaunchList(on, [replace(part, entries=[entry])], products))
                )

    def run(self) -> None:
        for name, one in self._lists:
            send("launch", name)
            plant = self.plants.get(name)
            if plant == "fault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if plant == "hang":
                time.sleep(1e6)
            if plant != "wrong":  # which leaves what the kernel writes as it was
                one.run()
            self._device.synchronize()


def work(options: argparse.Namespace, begin: int, pipe: int) -> None:
    """Run the cases from number `begin` on."""
    OneByOne.pipe = pipe
    cuda.place = "gpu" if options.device == gpu.CUDA else "emulator"
    OneByOne.plants = dict(plant.split("=") for plant in options.plant)
    device.LaunchList = backend.LaunchList = OneByOne
    cuda.check_results, cuda.Fences.check = map(reporting, (cuda.check_results, cuda.Fences.check))
    run_operation = cuda.run

    def run(operation, **order):
        if not order.get("order"):
            send("operation", operation.name)
        return run_operation(operation, **order)

    cuda.run = run
    for number, run_case in enumerate(cases(options.only)[begin:], begin):
        send("case", str(number))
        torch.manual_seed(0)
        try:
            run_case()
        except AssertionError as error:
            send("wrong", first_line(error))
        except Exception as error:  # whatever it is: the GPU may be lost, and this process with it
            send("fault", first_line(error))
            os._exit(gpu.LOST)
    send("end", "")


def reporting(check: Callable) -> Callable:
    """Wrap a check: report what it finds instead of ending the case."""

    def checked(*arguments) -> None:
        try:
            check(*arguments)
        except AssertionError as error:
            send("wrong", first_line(error))

    return checked


def first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0] or type(error).__name__


# The process that listens


class Found:
    """What is known of each kernel so far."""

    def __init__(self, sources: list[str], keep: Callable[[list[dict]], None]):
        texts = [(compiler.KERNELS / source).read_text(encoding="utf-8") for source in sources]
        names = [name for text in texts for name in EXPORT.findall(text)]
        self.states = {name: [MISSED, "", 0] for name in names}
        self.case, self.ended = 0, False
        self._keep, self._operation, self._current, self._last = keep, "", set(), ""

    def hear(self, event: str, what: str) -> None:
        """An event of the other process."""
        if event in ("load", "launch"):
            self._last = what
            self.states.setdefault(what, [MISSED, "", 0])[2] += event == "launch"
            if event == "launch":
                self._current.add(what)
        elif event == "wrong":
            for name in sorted(self._current):
                self.judge(name, WRONG, f"{self._operation}: {what}")
        elif event == "fault":
            self.judge(self._last, FAULT, what)
        else:
            self._pass()
            if event == "operation":
                self._operation = what
            elif event == "case":
                self.case, self._last = int(what), ""
            self.ended = event == "end"

    def stop(self, state: str, why: str) -> None:
        """The other process is gone."""
        self.judge(self._last or "before any kernel", state, why)
        self._current.clear()
        self._last = ""

    def judge(self, name: str, state: str, why: str = "") -> None:
        """Say what is known of a kernel, once; the worst holds."""
        known = self.states.setdefault(name, [MISSED, "", 0])
        if known[0] == state or (state == OK and known[0] != MISSED) or known[0] in (FAULT, HANGS):
            return
        known[:2] = state, why
        print(f"{name:<36} {state:<6} {why}".rstrip(), flush=True)
        self._keep(self.rows())

    def rows(self) -> list[dict]:
        return [
            {"kernel": name, "state": state, "launches": count, "why": why, "ratio": None}
            for name, (state, why, count) in self.states.items()
        ]

    def _pass(self) -> None:
        for name in sorted(self._current):
            self.judge(name, OK)
        self._current.clear()


def events(pipe: int, silence: float, end: float) -> Iterator[tuple[str, str]]:
    """What is written to a pipe, until it is closed.

    Raises:
        TimeoutError: nothing comes for so many seconds, or the time is up.
    """
    heard: queue.Queue = queue.Queue()

    def listen() -> None:
        with open(pipe) as lines:
            for line in lines:
                heard.put(line)
        heard.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        left = end - time.monotonic()
        try:
            line = heard.get(timeout=min(silence, max(left, 0.1)))
        except queue.Empty:
            raise TimeoutError(f"no word for {silence:.0f} seconds") from None
        if left < 0:
            raise TimeoutError("the time is up")
        if line is None:
            return
        yield tuple(json.loads(line))


def probe(options: argparse.Namespace, found: Found) -> None:
    """Run all cases, in as many processes as it takes."""
    begin, number = 0, len(cases(options.only))
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    while begin < number and not found.ended and time.monotonic() < end:
        reading, writing = os.pipe()
        process = FORK.Process(target=work, args=(options, begin, writing))
        process.start()
        os.close(writing)
        try:
            for event in events(reading, options.silence, end):
                found.hear(*event)
            process.join()
            if not found.ended:
                found.stop(FAULT, f"its process ended with status {process.exitcode}")
        except TimeoutError as error:
            if time.monotonic() < end:
                found.stop(HANGS, str(error))
        finally:
            process.kill()
            process.join()
        begin = max(begin, found.case) + 1


def main(arguments: list[str] | None = None) -> int:
    """Probe every kernel; the exit status: 1 if not all are right."""
    parser = common.parser(__doc__)
    gpu.add_options(parser, gpu.CUDA, gpu.EMULATOR)
    parser.add_argument(
        "--silence", type=float, default=SILENCE, metavar="S", help="of a process that hangs"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(test_turns_cuda.CASES),
        metavar="FILE.cu",
        help="the kernels of these alone",
    )
    parser.add_argument(
        "--plant",
        action="append",
        default=[],
        metavar="KERNEL=WHAT",
        help=f"a rehearsal: {', '.join(PLANTS)}",
    )
    options = common.parse(parser, arguments)
    conditions = common.conditions(
        options, device=options.device, baseline="the reference of each operation"
    )
    sources = options.only or sorted(test_turns_cuda.CASES)
    found = Found(sources, lambda rows: common.keep("probe", rows, conditions, options))
    probe(options, found)
    common.report("probe", found.rows(), conditions, options)
    return int(any(row["state"] != OK for row in found.rows()))


if __name__ == "__main__":
    sys.exit(main())
