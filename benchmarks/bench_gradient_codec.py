"""Packing a bucket of gradients into messages, adding messages up, unpacking them: fused loops,
plain PyTorch, a copy.

A bucket has the values that 25 MB of float32 hold, DistributedDataParallel's default; `sum` adds up
one shard of each of the processes. `copy` moves as many bytes as the operation reads and writes,
half of them read. With --device cuda, the kernels are measured instead, on the gradient of a
feed-forward weight, see gpu_operations.py.
"""

import sys
from collections.abc import Iterator

import bench_operations
import common
import gpu
import gpu_operations
import torch
from operations import PROCESSES, QUICK, Call, messages

from lsq.native import loader

OPERATIONS = ("PackGradients", "SumMessages", "UnpackGradients")
BUCKET = 25 * 2**20 // 4
QUICK_BUCKET = 5000
CASES = [  # dtype of the bucket, bits of the codes, rounded at random
    (torch.float32, 8, False),
    (torch.bfloat16, 8, False),
    (torch.float32, 4, True),
]
"""What int8 modes send of each dtype, and what the 4-bit mode does."""


def rows(
    values: int, dtype: torch.dtype, bits: int, stochastic: bool, rounds: int
) -> Iterator[dict]:
    """Rows of the table for one case."""
    for operation in messages(values, dtype, bits, stochastic):
        call = Call(size=QUICK, backward="-", operation=operation)
        for row in bench_operations.rows(call, rounds):
            name, _, _ = row.pop("operation"), row.pop("backward"), row.pop("result")
            yield {
                "operation": name
                + (", error" if getattr(operation, "error", None) is not None else ""),
                "dtype": str(dtype).removeprefix("torch."),
                "bits": bits,
                "rounding": "stochastic" if stochastic else "nearest",
                **row,
            }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    gpu.add_options(parser, gpu.CPU, gpu.CUDA, gpu.EMULATOR)
    options = common.parse(parser, arguments)
    if options.device != gpu.CPU:
        options.dropout, options.operations = 0.0, OPERATIONS
        return gpu_operations.main("gradient_codec", options)
    values = QUICK_BUCKET if options.quick else BUCKET
    table = [row for case in CASES for row in rows(values, *case, options.rounds)]
    conditions = common.conditions(
        options,
        baseline="plain PyTorch: the operation's reference",
        shape={"values": values, "shards": PROCESSES, "block": 128},
        library=loader.description(),
        dtypes=["float32", "bfloat16"],
    )
    common.report("gradient_codec", table, conditions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
