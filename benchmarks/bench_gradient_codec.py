"""Packing a bucket of gradients into messages, adding messages up, unpacking them: fused loops, plain PyTorch, a copy.

A bucket has the values that 25 MB of float32 hold, DistributedDataParallel's default; `sum` adds up one shard of
each of the processes. `copy` moves as many bytes as the operation reads and writes, half of them read.
With --device cuda, the kernels are measured instead, on the gradient of a feed-forward weight, see gpu_operations.py.
"""

import sys
from collections.abc import Callable, Iterator

import common
import gpu
import gpu_operations
import torch

from lsq.csrc import loader
from lsq.ops import gradient_codec, gradient_messages
from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.random import draw_key

OPERATIONS = ("gradient_pack", "gradient_sum", "gradient_unpack")
BUCKET = 25 * 2**20 // 4
QUICK_BUCKET = 5000
PROCESSES = 8
CASES = [  # dtype of the bucket, bits of the codes, rounded at random
    (torch.float32, 8, False),
    (torch.bfloat16, 8, False),
    (torch.float16, 8, False),
    (torch.float32, 4, True),
]
"""What int8 modes send of each dtype, and what the 4-bit mode does."""


def sides(
    values: int, dtype: torch.dtype, bits: int, stochastic: bool
) -> Iterator[tuple[str, int, Callable, Callable]]:
    """(operation, bytes that it reads and writes, the fused loop, the same in PyTorch) of a bucket."""
    layout = MessageLayout.for_values(values, PROCESSES, bits=bits)
    eight = MessageLayout.for_values(values, PROCESSES)
    x, key = torch.randn(values).to(dtype), draw_key() if stochastic else None
    error = torch.empty(values)
    messages = torch.empty(PROCESSES, layout.message_bytes, dtype=torch.uint8)
    sums = torch.empty(PROCESSES, eight.message_bytes, dtype=torch.uint8)
    cut = {"length": layout.length, "bits": bits}
    rounded = {"stochastic": stochastic, "key": key}

    for wanted in (None, error):
        def pack(wanted=wanted):
            gradient_codec.pack(x, layout, out=messages, error=wanted, **rounded)

        def plain(wanted=wanted):
            gradient_messages.pack_reference(
                x[None], key, shards=PROCESSES, **cut, stochastic=stochastic, error=wanted is not None
            )

        name = "pack" if wanted is None else "pack, error"
        yield name, _bytes(x, messages) + (0 if wanted is None else _bytes(wanted)), pack, plain

    yield (
        "sum", _bytes(messages, sums[0]),
        lambda: gradient_codec.sum_messages(messages, layout, out=sums[0], out_layout=eight, factor=0.125),
        lambda: gradient_messages.sum_reference(messages, None, **cut, factor=0.125),
    )  # fmt: skip
    for shard in range(PROCESSES):
        sums[shard].copy_(sums[0])
    yield (
        "unpack", _bytes(sums, x),
        lambda: gradient_codec.unpack(sums, eight, out=x),
        lambda: gradient_messages.unpack_reference(sums[None], values=values, length=layout.length, dtype=dtype),
    )  # fmt: skip


def rows(values: int, dtype: torch.dtype, bits: int, stochastic: bool, rounds: int) -> Iterator[dict]:
    """Rows of the table for one case."""
    for operation, moved, fused, plain in sides(values, dtype, bits, stochastic):
        source = torch.zeros(max(1, moved // 2), dtype=torch.uint8)
        target = torch.zeros_like(source)
        measured = {"plain": plain, "fused": fused, "copy": lambda s=source, t=target: t.copy_(s)}
        if not loader.available():
            del measured["fused"]
        timings = common.alternate(measured, rounds=rounds)
        for columns in common.beside_a_copy(timings, moved):
            yield {
                "operation": operation,
                "dtype": str(dtype).removeprefix("torch."),
                "bits": bits,
                "rounding": "stochastic" if stochastic else "nearest",
                **columns,
            }


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    gpu.add_options(parser, gpu.CPU, gpu.CUDA, gpu.EMULATOR)
    options = common.parse(parser, arguments)
    if options.device != gpu.CPU:
        options.dropout = 0.0
        return gpu_operations.main("gradient_codec", OPERATIONS, options)
    values = QUICK_BUCKET if options.quick else BUCKET
    table = [row for case in CASES for row in rows(values, *case, options.rounds)]
    conditions = common.conditions(
        options,
        baseline="plain PyTorch: the operation's reference",
        shape={"values": values, "shards": PROCESSES, "block": 128},
        library=loader.description(),
        dtypes=["float32", "bfloat16", "float16"],
    )
    common.report("gradient_codec", table, conditions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
