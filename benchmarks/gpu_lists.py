"""The launches of a training step, found without a GPU, and what their kernels do, counted in the emulator.

Products and their ends are listed apart, as with cuBLASLt: gpu_step.py joins those that one kernel does. Kernels are
counted at few tokens and true widths, where warps access memory as they do at many. What is counted of a tensor is
scaled by its size: see `Work`.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from operations import PADDING, Size, layer_config, table, words

from lsq import gemm
from lsq.backends.absent import AbsentGPU
from lsq.backends.products import launched_by_operation
from lsq.config import QuantConfig
from lsq.csrc import profile
from lsq.csrc.launch import Launch, Product
from lsq.csrc.profile import Profile, Traffic
from lsq.layers import programs
from lsq.layers.blocks import Sentences
from lsq.layers.programs import Mode
from lsq.ops.adam import NUMBERS, Adam
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.samples import Sampler
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight

LAYERS = 6
"""Of the encoder, and of the decoder."""
DROPOUT = 0.1
FEW = 4
"""Sentences of the batch whose kernels are counted."""
SECTOR = 32
SPARSE = 0.5
"""Of a tensor that does not grow with the batch; where less of it is touched, more is touched in a larger batch."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A pass of a step."""

    name: str
    times: int
    """That it runs in a step."""
    entries: tuple[Launch | Product, ...]
    alike: dict[int, int]
    """By the id of a launch: launches of its key in its operation."""


def step(size: Size, quant: QuantConfig) -> list[Part]:
    """A step of training without calibration: every program of it, and the update of the weights."""
    found = []
    for times, program in training(size, quant):
        with gemm.ended_by(None):
            entries = launched_by_operation(program, torch.float32)
        passes = {"forward": entries[: program.forward_length], "backward": entries[program.forward_length :]}
        found += [
            Part(
                name=f"{program.name} {name}", times=times, entries=tuple(itertools.chain(*of_pass)),
                alike={number: count for one in of_pass for number, count in alike(one).items()},
            )
            for name, of_pass in passes.items()
        ]
    return [*found, update(size, quant)]


def training(size: Size, quant: QuantConfig) -> list[tuple[int, Program]]:
    """(how often it runs in a step, program), built for products apart from their ends."""
    with gemm.ended_by(None):
        return list(_training(size, quant))


def _training(size: Size, quant: QuantConfig) -> Iterator[tuple[int, Program]]:
    config, mode = layer_config(size, quant, DROPOUT), Mode(training=True, backward=True, backend=AbsentGPU())
    sentences = Sentences(rows=size.tokens, count=size.sentences)
    yield 2, programs.embedding(quant, size.tokens, table(size, DROPOUT), mode)
    yield LAYERS, programs.encoder_layer(config, sentences, mode)
    yield LAYERS, programs.decoder_layer(config, sentences, sentences, mode)
    yield 1, programs.vocabulary_loss(quant, size.tokens, words(size), mode, padding=PADDING, smoothing=0.1)


def parameters(size: Size, quant: QuantConfig) -> int:
    """Numbers that a model learns; its three embeddings and the projection onto the vocabulary share one table."""
    of_layers = sum(
        times * sum(math.prod(parameter.shape) for parameter in program.parameters)
        for times, program in training(size, quant)
        if program.name.endswith("layer")
    )
    return of_layers + size.vocabulary * size.hidden


def update(size: Size, quant: QuantConfig) -> Part:
    """Adam's two launches: what is not rounded, and weights with their codes, here as if they were one."""
    table = size.vocabulary * size.hidden
    weights = table + sum(
        times * math.prod(weight.values.shape)
        for times, program in training(size, quant)
        if program.name.endswith("layer")
        for weight in program.weights.values()
    )
    coded = adam(weights // size.hidden, size.hidden, quant)
    plain = adam(max(1, (parameters(size, quant) - weights) // size.hidden), size.hidden)
    entries = tuple(entry for one in (plain, coded) for entry in on_meta(one).cuda())
    return Part(name="update", times=1, entries=entries, alike=alike(entries))


def adam(rows: int, columns: int, quant: QuantConfig | None = None) -> Adam:
    """Of a matrix, virtual; with codes where `quant` says of what kind."""

    def tensor(name, *shape, dtype=torch.float32):
        return VirtualTensor(name=name, shape=shape, dtype=dtype)

    names = ("weight", "gradient", "first", "second")
    tensors = {name: tensor(name, rows, columns) for name in names}
    tensors |= {f"new_{name}": tensors[name] for name in names if name != "gradient"}
    if quant is not None:
        tensors["rounded"] = Weight(
            format=quant.weights, codes=tensor("codes", rows, columns, dtype=torch.int8),
            scale=tensor("scale", rows), clip=tensor("clip", rows),
        )
    return Adam(**tensors, numbers=tensor("numbers", NUMBERS), gradient_factor=tensor("factor", 1))


def key_of(entry: Launch) -> str:
    """Equal for launches that do the same for each of their values."""
    found = [str(entry.kernel)]
    for argument in entry.arguments:
        if isinstance(argument, Operation):
            missing = [leaf.name for leaf in argument.leaves() if leaf.of(argument) is None]
            attributes = {
                name: value for name, value in sorted(argument.attributes().items())
                if "subsequence" not in name and not dataclasses.is_dataclass(value)
            }  # fmt: skip
            found.append(f"{argument.name} without {', '.join(missing)}; {attributes}")
        elif argument is None:
            found.append("-")
    return " | ".join(found)


def alike(entries: Iterable[Launch | Product]) -> dict[int, int]:
    """By the id of each launch of an operation: how many of its key there are."""
    keys = {id(entry): key_of(entry) for entry in entries if isinstance(entry, Launch)}
    found = Counter(keys.values())
    return {number: found[key] for number, key in keys.items()}


def counted_alike(size: Size, quant: QuantConfig) -> dict[str, int]:
    """By key: how many launches of it there are in an operation with few sentences, where it is counted."""
    operations = (launches(operation, "meta") for operation in small_operations(size, quant))
    return {key_of(entry): count for one in operations for entry, count in zip(one, alike(one).values(), strict=True)}


def count_kernels(sizes: Iterable[Size], quant: QuantConfig) -> dict[str, Profile]:
    """By key: what each kernel of the steps of these models does; the sizes are those of the batches to count at."""
    best: dict[str, tuple[int, Operation]] = {}
    for size in sizes:
        for operation in small_operations(size, quant):
            for entry in launches(operation, "meta"):
                weight = sum(map(bytes_of, profile.operands_of(entry)))
                if key_of(entry) not in best or weight < best[key_of(entry)][0]:
                    best[key_of(entry)] = weight, operation
    found = {}
    for operation in {id(chosen): chosen for _, chosen in best.values()}.values():
        entries = launches(operation, "cpu")
        for entry, counted in zip(entries, profile.profile(entries), strict=True):
            if best[key_of(entry)][1] is operation:
                found.setdefault(key_of(entry), counted)
    return found


def small_operations(size: Size, quant: QuantConfig) -> Iterator[Operation]:
    """Of a step with few sentences; of embeddings, whose work does not grow evenly, with all of them."""
    small = dataclasses.replace(size, sentences=min(FEW, size.sentences))
    for _, program in training(small, quant):
        if program.name != "embedding":
            yield from program.operations
    yield from training(size, quant)[0][1].operations
    yield from (adam(FEW, size.hidden), adam(64, size.hidden, quant))


def launches(operation: Operation, place: str) -> list[Launch]:
    """What an operation launches beside products, on random tensors; products have left small sums."""
    real = Sampler(place).operation(operation) if place == "cpu" else on_meta(operation)
    with gemm.ended_by(None):
        scratch = [
            torch.randint(-999, 999, shape, dtype=dtype) if place == "cpu" and dtype == torch.int32
            else torch.zeros(shape, dtype=dtype, device=place)
            for shape, dtype in real.cuda_scratch()
        ]  # fmt: skip
        return [entry for entry in real.cuda(*scratch) if isinstance(entry, Launch)]


def on_meta(operation: Operation) -> Operation:
    """The same with tensors that take no memory."""
    made = {}

    def make(tensor):
        if tensor not in made:
            made[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return made[tensor]

    return operation.bind(make)


def bytes_of(tensor: torch.Tensor) -> int:
    """Its size."""
    return tensor.numel() * tensor.element_size()


def place_of(tensor: torch.Tensor) -> tuple:
    """Equal for the same memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a launch does: bytes by the place of their tensor, each counted once, and work by warps.

    A tensor that grows with the batch is read and written as often as at few tokens; one that does not, is read by as
    many more warps as there is more work, and once from memory. One that grows more than the work is touched in part.
    """

    reads: dict[object, float]
    writes: dict[object, float]
    sectors: float
    """Of all requests."""
    shared_passes: float
    instructions: dict[str, float]
    warps: int
    warps_of_block: int

    @staticmethod
    def of(counted: Profile, entry: Launch, shared: float = 1.0) -> "Work":
        """Of a launch on large tensors whose like was counted on small ones; `shared` launches share its work."""
        tensors = profile.operands_of(entry)
        work = growth(counted, tensors) / shared
        reads: dict[object, float] = {}
        writes: dict[object, float] = {}
        sectors = 0.0
        for real, one in zip(tensors, counted.operands, strict=True):
            own = min(bytes_of(real) / one.bytes, work) if one.bytes else 0.0
            for traffic, moved in ((one.reads, reads), (one.writes, writes), (one.atomics, writes)):
                touched = scaled_bytes(traffic, one.bytes, bytes_of(real), work)
                if touched:
                    moved[place_of(real)] = moved.get(place_of(real), 0.0) + touched
                sectors += traffic.sectors * (own if own > 1 else work)
        block = entry.block[0] * entry.block[1] * entry.block[2]
        return Work(
            reads=reads, writes=writes, sectors=sectors, shared_passes=counted.shared_passes * work,
            instructions={kind: number * work for kind, number in counted.instructions.items()},
            warps=-(-block // profile.WARP) * entry.grid[0] * entry.grid[1] * entry.grid[2],
            warps_of_block=-(-block // profile.WARP),
        )


def growth(counted: Profile, tensors: list[torch.Tensor]) -> float:
    """How much larger these tensors are, by that which has grown most of those that are touched."""
    pairs = zip(tensors, counted.operands, strict=True)
    grown = (bytes_of(real) / one.bytes for real, one in pairs if one.reads.touched + one.writes.touched)
    return max(grown, default=1.0)


def scaled_bytes(traffic: Traffic, counted: int, real: int, work: float) -> float:
    """Bytes of a tensor of `real` bytes that are touched, where one of `counted` bytes was touched so."""
    touched = traffic.touched * SECTOR
    if not touched:
        return 0.0
    grows = min(real / counted, work)
    if grows <= 1 and touched < SPARSE * counted:
        grows = work
    return min(touched * grows, real)
