"""Times fused operations: what lsq's loops take, what plain PyTorch takes, and what copying the
same bytes takes.

The operations and the shapes of their tensors are those of the programs of a training, and some
outside programs; the values are drawn at random. The plain PyTorch side is the operation's
reference, with torch._int_mm in place of its exact float64 products. It draws the same random
numbers as the fused loops, with torch's integer operations, and these
take most of its time where something is dropped or rounded at random: see --dropout 0. With
--device cuda, the operations' CUDA implementations are measured instead, see gpu_operations.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from unittest import mock

import common
import gpu
import gpu_operations
import torch
from operations import QUICK, Call, Size, calls, counted, names

from lsq import gemm
from lsq.native import loader
from lsq.program.samples import Sampler
from lsq.run.backends import backend

SIZE = Size(name="base", hidden=512, feed_forward=2048, heads=8, sentences=64)


def rows(call: Call, rounds: int) -> Iterator[dict]:
    """Rows of the table for one call."""
    operation = Sampler().operation(call.operation)
    moved = sum(size for _, size in counted(operation).values())
    source = torch.zeros(max(1, moved // 2), dtype=torch.uint8)
    target = torch.zeros_like(source)
    sides = {"plain": operation.reference}
    if loader.available():
        place = backend("cpu")
        scratch = [place.allocate(*wanted) for wanted in place.scratch(operation)]
        sides["fused"] = place.prepare([(operation, scratch)])
    sides["copy"] = lambda: target.copy_(source)
    with mock.patch.object(gemm, "reference", gemm.int8_product), torch.no_grad():
        timings = common.alternate(sides, rounds=rounds)
    for columns in common.beside_a_copy(timings, moved):
        yield {"operation": call.name, "backward": call.backward, "result": call.result, **columns}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    gpu.add_options(parser, gpu.CPU, gpu.CUDA, gpu.EMULATOR)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="probability, in every place of a layer"
    )
    parser.add_argument(
        "--operations",
        nargs="+",
        default=[],
        metavar="NAME",
        help="classes of lsq/ops, e.g. ResidualNorm; all",
    )
    options = common.parse(parser, arguments)
    if unknown := set(options.operations) - (known := names()):
        parser.error(
            f"nothing runs {', '.join(sorted(unknown))}; operations are {', '.join(sorted(known))}"
        )
    if options.device != gpu.CPU:
        return gpu_operations.main("operations", options)
    size = QUICK if options.quick else SIZE
    table = [
        row
        for call in calls(options.operations, size, options.dropout)
        for row in rows(call, options.rounds)
    ]
    conditions = common.conditions(
        options,
        baseline="plain PyTorch: the operation's reference",
        shape=asdict(size),
        dropout=options.dropout,
        library=loader.description(),
        dtypes=["float32", "int8"],
    )
    common.report("operations", table, conditions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
