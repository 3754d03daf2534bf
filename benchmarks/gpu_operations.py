"""Times the CUDA implementations of operations, as a training calls them, against copying as many
bytes.

The operations and the shapes of their operands are those of operations.py at the sizes of
transformer base and big, with activations in bfloat16. An operation is a list of kernels and
products, and its parts are timed apart: its kernels, against a copy; its products, which
    bench_gemm.py compares; and the kernels that only finish sums.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from functools import partial

import common
import gpu
import torch
from operations import QUICK, Call, calls, counted, sizes

from lsq.native.device import Device
from lsq.native.launch import Launch, Product
from lsq.program.operation import Operation
from lsq.program.samples import Sampler

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
    """Whether it only finishes sums."""
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
    """Where a contiguous tensor begins and ends."""
    return tensor.data_ptr(), tensor.data_ptr() + _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def rows(call: Call, device: Device, options: argparse.Namespace) -> Iterator[dict]:
    """The row of the table for one call."""
    operation, scratch, entries = bound(call, device.place)
    moved = moved_bytes(operation, entries)
    held = {
        tensor.data_ptr(): _bytes(tensor)
        for tensor in (*operation.inputs, *operation.outputs, *scratch)
    }
    count = gpu.copies(device, moved, sum(held.values()))
    lists: dict[str, list] = {part: [] for part in parts(entries)}
    for launched in [entries, *(bound(call, device.place)[2] for _ in range(count - 1))]:
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


def main(name: str, options: argparse.Namespace) -> int:
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
        (str(call), partial(rows, call, device, options))
        for size in measured
        for call in calls(options.operations, size, options.dropout)
    )
    return gpu.report(name, survey, conditions(), options)
