"""What one launch costs the host: lists of launches replayed by one call, against one call from
Python for each launch.

Without a GPU, the driver is a stub whose launches do nothing (stub_driver.cpp, built with g++), so
that the figure is the launcher's own cost. With one, launches go to it (`--gpu`): the list on a
stream, and the same list as a captured graph.
"""

import tempfile
from pathlib import Path

import common
import gpu
import stub
import torch

from lsq.native.device import Device
from lsq.native.launch import Launch, launch

KERNEL = str(Path(__file__).with_name("store_values.cu"))
LAUNCHES = 100
ARGUMENTS = 11


def entries(memory: torch.Tensor, count: int) -> list[Launch]:
    """Launches of a kernel that does next to nothing."""
    return [
        launch(KERNEL, "store_values", memory, 0, 1, *[number] * 8, grid=1, block=32)
        for number in range(count)
    ]


def sides(device: Device, count: int) -> dict:
    """Name of each side -> a function that launches `count` kernels."""
    memory = torch.zeros(64, dtype=torch.int64, device=device.place)
    work = device.list(entries(memory, count))
    single = [device.list([entry]) for entry in entries(memory, count)]

    def one_by_one() -> None:
        for each in single:
            each.run()

    found = {
        "one call each": one_by_one,
        "list": work.run,
    }
    if device.place.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work.run()
        found["graph of the list"] = graph.replay
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--gpu", action="store_true", help="launch on GPU 0 instead of on the stub driver"
    )
    options = common.parse(parser)
    count = 5 if options.quick else LAUNCHES
    with tempfile.TemporaryDirectory() as folder:
        device = gpu.open_device(gpu.CUDA) if options.gpu else stub.stub_device(Path(folder))[0]
        timings = common.alternate(
            sides(device, count), rounds=options.rounds, synchronize=device.synchronize
        )
    base = timings["one call each"].median
    rows = [
        {
            "side": side,
            "microseconds_per_launch": 1e6 * timing.median / count,
            "fastest": 1e6 * timing.fastest / count,
            "ratio": base / timing.median,
        }
        for side, timing in timings.items()
    ]
    conditions = common.conditions(
        options,
        **(gpu.conditions(device) if options.gpu else {}),
        baseline="one call from Python for each launch",
        launches=count,
        arguments=ARGUMENTS,
        driver="GPU" if options.gpu else "stub: launches do nothing",
    )
    common.report("launch", rows, conditions, options)


if __name__ == "__main__":
    main()
