"""Times the CUDA implementations of operations, as training steps call them, against copying as many bytes.

The operations and the shapes and dtypes of their operands come from the programs of layers at the sizes of transformer
base and big; the values are drawn at random, each in the range of what it stands for. An operation is a list of kernels
and products, and its parts are timed apart: its kernels, against a copy; its products, which bench_gemm.py compares;
and the kernels that only finish sums.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import common
import gpu
import gpu_extra
import torch
from compile_kernels import PADDED, SIZES, VOCABULARY

from lsq.config import LayerConfig, QuantConfig
from lsq.csrc.device import Device
from lsq.csrc.launch import Launch, Product
from lsq.program import kernels, layers
from lsq.program.program import Program
from lsq.program.tensor import Operation

TOKENS = (4096, 8192)
LENGTH = 32
"""Tokens of a sentence."""
POSITIONS = 1024
PADDING = 1
ACTIVATIONS = torch.bfloat16
FINISH = ("lsq_finish_sums", "lsq_column_scales", "lsq_sum_losses")
"""The kernels that only put together what the blocks of others have summed."""
GATHERED = {"embedding": (2, 3)}
"""Inputs of which only rows are read, as many values as the first output has."""
PARTS = ("operation", "kernels", "products", "finish")
"""What is timed of each operation."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and a batch."""

    name: str
    hidden: int
    feed_forward: int
    heads: int
    vocabulary: int
    padded: int
    sentences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sentences * self.length


QUICK = Size(name="quick", hidden=48, feed_forward=64, heads=3, vocabulary=50, padded=64, sentences=3, length=5)


def sizes(quick: bool) -> list[Size]:
    """What is measured, the smallest first."""
    if quick:
        return [QUICK]
    return [
        Size(
            name=name, hidden=hidden, feed_forward=feed_forward, heads=heads, vocabulary=VOCABULARY, padded=PADDED,
            sentences=tokens // LENGTH, length=LENGTH,
        )
        for tokens in TOKENS
        for name, (hidden, feed_forward, heads) in SIZES.items()
    ]  # fmt: skip


def programs(size: Size, quant: QuantConfig, dropout: float) -> Iterator[Program]:
    """Every kind of program of a training step."""
    config = LayerConfig(
        hidden=size.hidden, heads=size.heads, feed_forward=size.feed_forward, dropout=dropout,
        attention_dropout=dropout, activation_dropout=dropout, quant=quant,
    )  # fmt: skip
    batch, time, hidden = size.sentences, size.length, size.hidden
    yield layers.embedding(
        quant, batch, time, size.vocabulary, hidden, POSITIONS, PADDING, hidden**0.5, dropout, True, True, True
    )
    yield layers.encoder_layer(config, batch, time, True, True, True)
    yield layers.decoder_layer(config, batch, time, time, True, True, True, True)
    yield layers.linear(quant, size.tokens, hidden, hidden, True, True, True)
    yield layers.vocabulary_loss(quant, size.tokens, hidden, size.vocabulary, size.padded, PADDING, 0.1, True, True)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operation; its tensors have shapes and dtypes but no memory."""

    size: Size
    backward: str
    operation: Operation
    inputs: tuple[torch.Tensor | None, ...]
    outputs: tuple[torch.Tensor | None, ...]

    def __str__(self) -> str:
        return f"{self.operation.name}, {self.size.name}, {self.size.tokens} tokens: {self.result}"

    @property
    def result(self) -> str:
        """What it makes, in words."""
        found = next(tensor for tensor in self.operation.outputs if tensor is not None)
        like = next(tensor for tensor in self.outputs if tensor is not None)
        return f"{found.name} {str(like.dtype).removeprefix('torch.')}{list(like.shape)}"

    @property
    def signature(self) -> tuple:
        """Equal for calls that do the same work."""
        attributes = {name: value for name, value in self.operation.attributes.items() if "stream" not in name}
        tensors = (*self.inputs, *self.outputs)
        return self.operation.name, str(attributes), *(None if t is None else (t.shape, t.dtype) for t in tensors)


def calls(names: Sequence[str], size: Size, dropout: float) -> Iterator[Call]:
    """Every call of the named operations that does different work, in both backward modes."""
    seen = set()
    for backward in ("int8", "float"):
        quant = QuantConfig(backward=backward, **({"backward_dtype": "bfloat16"} if backward == "float" else {}))
        for program in programs(size, quant, dropout):
            placed = kernels.tensors(program, ACTIVATIONS)
            for operation in program.operations:
                inputs, outputs = (
                    tuple(None if tensor is None else placed[tensor] for tensor in group)
                    for group in (operation.inputs, operation.outputs)
                )
                call = Call(size=size, backward=backward, operation=operation, inputs=inputs, outputs=outputs)
                if operation.name in names and call.signature not in seen:
                    seen.add(call.signature)
                    yield call
    for operation in gpu_extra.operations(size.tokens, size.hidden, size.feed_forward):
        if operation.name in names:
            inputs, outputs = (
                tuple(None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in group)
                for group in (operation.inputs, operation.outputs)
            )
            yield Call(size=size, backward="int8", operation=operation, inputs=inputs, outputs=outputs)


def drawn(name: str, like: torch.Tensor, size: Size, place: torch.device) -> torch.Tensor:
    """Random values for a tensor called `name`, in the range of what it stands for."""
    shape, dtype = like.shape, like.dtype
    if dtype == torch.bool:  # padding: the last tenth of each sentence
        return (torch.arange(shape[-1], device=place) >= math.ceil(0.9 * shape[-1])).expand(shape).contiguous()
    if name == "places":
        return (torch.arange(shape[-1], device=place) + PADDING + 1).expand(shape).contiguous()
    if dtype == torch.int64:
        return torch.randint(PADDING + 1, size.vocabulary, shape, device=place)
    if name.startswith("message"):  # codes and the bytes of finite scales
        return torch.randint(0x3C, 0x40, shape, dtype=dtype, device=place)
    if dtype == torch.uint8:  # packed bits, one in eight of them set
        first, *others = (torch.randint(0, 256, shape, dtype=dtype, device=place) for _ in range(3))
        return first & others[0] & others[1]
    if dtype in (torch.int8, torch.int32):
        largest = 127 if dtype == torch.int8 else 20000
        return torch.randint(-largest, largest + 1, shape, dtype=dtype, device=place)
    if name == "second_moment":
        return torch.rand(shape, device=place)
    if len(shape) > 1:
        return (torch.randn(shape, device=place) * (0.01 if name.startswith("d_") else 1.0)).to(dtype)
    if name.startswith("log_normaliser"):
        return torch.full(shape, math.log(size.vocabulary), device=place)
    if name.endswith(("bias", "mean")):
        return 0.1 * torch.randn(shape, device=place)
    return (0.5 + torch.rand(shape, device=place)) * (1e-3 if "scale" in name else 1.0)


def bound(call: Call, place: torch.device) -> tuple[list, list, list[Launch | Product]]:
    """Inputs and outputs of one copy of a call, and its launches on them."""
    operation, definition = call.operation, call.operation.definition
    if definition.cuda is None:
        raise ValueError(f"operation {definition.name} has no CUDA implementation")
    inputs = [
        None if tensor is None else drawn(tensor.name, like, call.size, place)
        for tensor, like in zip(operation.inputs, call.inputs, strict=True)
    ]
    outputs = [None if like is None else torch.empty_like(like, device=place) for like in call.outputs]
    wanted = definition.cuda_scratch(*inputs, **operation.attributes) if definition.cuda_scratch else ()
    scratch = [torch.empty(shape, dtype=dtype, device=place) for shape, dtype in wanted]
    return inputs, outputs, definition.cuda(*inputs, *outputs, *scratch, **operation.attributes)


def is_finish(entry: Launch | Product) -> bool:
    """Whether it only finishes sums."""
    return isinstance(entry, Launch) and entry.kernel.name in FINISH


def parts(entries: list[Launch | Product]) -> dict[str, list[Launch | Product]]:
    """The entries of an operation: all of them, then each kind that there is."""
    found = {
        "operation": entries,
        "kernels": [entry for entry in entries if isinstance(entry, Launch) and not is_finish(entry)],
        "products": [entry for entry in entries if isinstance(entry, Product)],
        "finish": [entry for entry in entries if is_finish(entry)],
    }
    return {part: chosen for part, chosen in found.items() if chosen}


def moved_bytes(name: str, inputs: list, outputs: list, entries: list[Launch | Product]) -> int:
    """Bytes that the kernels of an operation must move.

    These are the operation's inputs and outputs that they have among their arguments, once; what products have made for
    them; and what they make for products. What they only hand to one another is not counted.
    """
    used = [
        _span(argument)
        for entry in entries
        if isinstance(entry, Launch) and not is_finish(entry)
        for argument in entry.arguments
        if isinstance(argument, torch.Tensor)
    ]

    def touched(tensor: torch.Tensor) -> bool:
        first, end = _span(tensor)
        return any(first < other_end and other_first < end for other_first, other_end in used)

    given = {tensor.data_ptr(): tensor for tensor in (*inputs, *outputs) if tensor is not None}
    products = [entry for entry in entries if isinstance(entry, Product)]
    made = {tensor.data_ptr(): tensor for product in products for tensor in (product.a, product.b)}
    counted = [tensor for tensor in given.values() if touched(tensor)]
    counted += [product.out for product in products if touched(product.out)]
    counted += [tensor for address, tensor in made.items() if address not in given and touched(tensor)]
    result = next(tensor for tensor in outputs if tensor is not None)
    tables = [inputs[number] for number in GATHERED.get(name, ()) if touched(inputs[number])]
    unread = sum(max(0, _bytes(table) - result.numel() * table.element_size()) for table in tables)
    return sum(map(_bytes, counted)) - unread


def tensors(inputs: list, outputs: list, entries: list[Launch | Product]) -> list[torch.Tensor]:
    """Every tensor of one copy of a call, once, scratch included."""
    found = [*inputs, *outputs]
    for entry in entries:
        found += entry.arguments if isinstance(entry, Launch) else (entry.a, entry.b, entry.out)
    return list({tensor.data_ptr(): tensor for tensor in found if isinstance(tensor, torch.Tensor)}.values())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a contiguous tensor begins and ends."""
    return tensor.data_ptr(), tensor.data_ptr() + _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def rows(call: Call, device: Device, options: argparse.Namespace) -> Iterator[dict]:
    """The row of the table for one call."""
    name = call.operation.name
    first = bound(call, device.place)
    moved = moved_bytes(name, *first)
    count = gpu.copies(device, moved, sum(map(_bytes, tensors(*first))))
    bounds = [first, *(bound(call, device.place) for _ in range(count - 1))]
    lists: dict[str, list] = {part: [] for part in parts(first[2])}
    for *_, entries in bounds:
        for part, chosen in parts(entries).items():
            lists[part].append(device.list(chosen, title=name).run)
    copied = gpu.copy_sides(device, moved, count) if "kernels" in lists else {}
    timings = gpu.alternate(device, {**lists, **copied}, rounds=options.rounds)
    microseconds = {part: 1e6 * timings[part].median if part in timings else None for part in PARTS}
    kernel, copy = (timings["kernels"].median, gpu.fastest_copy(timings)) if copied else (None, None)
    yield {
        "operation": name,
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


def main(name: str, operations: Sequence[str], options: argparse.Namespace) -> int:
    """Run the benchmark called `name` for these operations on a GPU or in the emulator; the exit status.

    Raises:
        ValueError: no program of a layer has an operation of that name.
        RuntimeError: there is no such device.
    """
    options.quick |= options.device == gpu.EMULATOR
    missing = set(operations) - {call.operation.name for call in calls(operations, QUICK, options.dropout)}
    if missing:
        raise ValueError(f"no program of a layer has {', '.join(sorted(missing))}; name operations of a training step")
    device = gpu.open_device(options.device)
    bandwidth = gpu.copy_bandwidth(device, options.rounds)
    survey = gpu.Survey(options.seconds)
    survey.measure(
        (str(call), partial(rows, call, device, options))
        for size in sizes(options.quick)
        for call in calls(operations, size, options.dropout)
    )
    conditions = common.conditions(
        options,
        **gpu.conditions(device, copy_gigabytes_per_second=bandwidth),
        baseline="copying as many bytes on the device",
        dropout=options.dropout,
        dtypes=["bfloat16", "int8"],
        shapes=[dataclasses.asdict(size) for size in sizes(options.quick)],
    )
    return gpu.report(name, survey, conditions, options)
