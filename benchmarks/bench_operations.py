"""Fused operations beside plain PyTorch and a copy, and CUDA kernels of operations beside a copy.

The operations and the shapes of their tensors are those of the programs of a training, and some
outside programs; the values are drawn at random. On the CPU, "plain" is the operation's reference,
with torch._int_mm in place of its exact float64 products. It draws the same random numbers as the
fused loops with torch's integer operations, which take most of its time where something is dropped
or rounded at random: see --dropout 0. With --device cuda, transformer base and big are measured,
with activations in bfloat16. There an operation is a list of kernels and products, and its parts
are timed apart: its kernels, against a copy; its products, which `lsq tune` compares; and the
kernels that only finish sums.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from unittest import mock

import common
import gpu
import torch
from operations import QUICK, Call, Size, calls, counted, names, sizes

from lsq import gemm
from lsq.native import loader
from lsq.native.device import Device
from lsq.native.launch import Launch, Product
from lsq.program.operation import Operation
from lsq.program.samples import Sampler
from lsq.run.backends import backend

SIZE = Size(name="base", hidden=512, feed_forward=2048, heads=8, sentences=64)


def rows(call: Call, rounds: int) -> Iterator[dict]:
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


TOKENS = (4096, 8192)
ACTIVATIONS = torch.bfloat16
FINISH = ("lsq_finish_sums", "lsq_finish_own_sums", "lsq_sum_losses")
"""The kernels that only put together what the blocks of others have summed."""
PARTS = ("operation", "kernels", "products", "finish")
"""What is timed of each operation."""


def bound(
    call: Call, place: torch.device
) -> tuple[Operation, list[torch.Tensor], list[Launch | Product]]:
    """One copy of a call, its scratch memory, and its launches on them."""
    operation = Sampler(place, ACTIVATIONS).operation(call.operation)
    scratch = [
        torch.empty(shape, dtype=dtype, device=place) for shape, dtype in operation.cuda_scratch()
    ]
    return operation, scratch, operation.cuda(*scratch)


def is_finish(entry: Launch | Product) -> bool:
    return isinstance(entry, Launch) and entry.kernel.name in FINISH


def parts(entries: list[Launch | Product]) -> dict[str, list[Launch | Product]]:
    """The entries of an operation: all of them, then each kind that there is."""
    found = {
        "operation": entries,
        "kernels": [
            entry for entry in entries if isinstance(entry, Launch) and not is_finish(entry)
        ],
        "products": [entry for entry in entries if isinstance(entry, Product)],
        "finish": [entry for entry in entries if is_finish(entry)],
    }
    return {part: chosen for part, chosen in found.items() if chosen}


def moved_bytes(operation: Operation, entries: list[Launch | Product]) -> int:
    """Bytes that the kernels of an operation must move.

    These are the operation's inputs and outputs, once, but for the operands of its products; what
    products have made for the kernels; and what they make for products. What they only hand to one
    another is not counted.
    """
    launches = [entry for entry in entries if isinstance(entry, Launch) and not is_finish(entry)]
    arguments = [argument for entry in launches for argument in entry.arguments]
    passed = [_span(argument) for argument in arguments if isinstance(argument, torch.Tensor)]
    whole = any(isinstance(argument, Operation) for argument in arguments)
    products = [entry for entry in entries if isinstance(entry, Product)]
    operands = {
        tensor.data_ptr(): tensor for product in products for tensor in (product.a, product.b)
    }
    given = counted(operation)

    def touched(tensor: torch.Tensor) -> bool:
        first, end = _span(tensor)
        return any(first < other_end and other_first < end for other_first, other_end in passed)

    moved = sum(
        size
        for address, (tensor, size) in given.items()
        if touched(tensor) or (whole and address not in operands)
    )
    made = [tensor for address, tensor in operands.items() if address not in given]
    return moved + sum(
        _bytes(tensor)
        for tensor in [*made, *(product.out for product in products)]
        if touched(tensor)
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def gpu_rows(call: Call, device: Device, options: argparse.Namespace) -> Iterator[dict]:
    operation, scratch, entries = bound(call, device.torch_device)
    moved = moved_bytes(operation, entries)
    held = {
        tensor.data_ptr(): _bytes(tensor)
        for tensor in (*operation.inputs, *operation.outputs, *scratch)
    }
    count = gpu.copies(device, moved, sum(held.values()))
    lists: dict[str, list] = {part: [] for part in parts(entries)}
    for launched in [entries, *(bound(call, device.torch_device)[2] for _ in range(count - 1))]:
        for part, chosen in parts(launched).items():
            lists[part].append(device.list(chosen, title=call.name).run)
    copied = gpu.copy_sides(device, moved, count) if "kernels" in lists else {}
    timings = gpu.alternate(device, {**lists, **copied}, rounds=options.rounds)
    microseconds = {part: 1e6 * timings[part].median if part in timings else None for part in PARTS}
    kernel, copy = (
        (timings["kernels"].median, gpu.fastest_copy(timings)) if copied else (None, None)
    )
    yield {
        "operation": call.name,
        "model": call.size.name,
        "tokens": call.size.tokens,
        "backward": call.backward,
        "result": call.result,
        **{f"{part}_microseconds": value for part, value in microseconds.items()},
        "copy_microseconds": 1e6 * copy if copied else None,
        "megabytes": 1e-6 * moved,
        "gigabytes_per_second": 1e-9 * moved / kernel if copied else None,
        "ratio": copy / kernel if copied else None,
    }


def gpu_main(name: str, options: argparse.Namespace) -> int:
    """Run the benchmark called `name` for `options.operations` on a GPU or in the emulator; the
    exit status.

    Raises:
        RuntimeError: there is no such device.
    """
    options.quick |= options.device == gpu.EMULATOR
    device = gpu.open_device(options.device)
    bandwidth = gpu.copy_bandwidth(device, options.rounds)
    measured = [QUICK] if options.quick else sizes(*TOKENS)

    def conditions() -> dict:
        return common.conditions(
            options,
            **gpu.conditions(device, copy_gigabytes_per_second=bandwidth),
            baseline="copying as many bytes on the device",
            dropout=options.dropout,
            dtypes=["bfloat16", "int8"],
            shapes=[dataclasses.asdict(size) for size in measured],
        )

    survey = gpu.survey(name, conditions(), options)
    survey.measure(
        (str(call), partial(gpu_rows, call, device, options))
        for size in measured
        for call in calls(options.operations, size, options.dropout)
    )
    return gpu.report(name, survey, conditions(), options)


def main(arguments: list[str] | None = None) -> int:
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
        return gpu_main("operations", options)
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
