"""The launches of a training step, found without a GPU, and what their kernels do, counted in the
emulator.

Products and their ends are listed apart, as with cuBLASLt: model_gpu_step.py joins those that one
kernel does. Kernels are counted at few tokens and true widths, where warps access memory as they
do at many; gpu_model.py scales what is counted.
"""

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from gpu_model import bytes_of
from operations import PADDING, Size, layer_config, table, words

from lsq import gemm
from lsq.config import QuantConfig
from lsq.emulator import profile
from lsq.emulator.profile import Profile
from lsq.gemm.configuration import TileConfiguration, default_tile
from lsq.gemm.product_key import ProductKey
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode
from lsq.native import geometry
from lsq.native.launch import Launch, Product
from lsq.ops.adam import NUMBERS, Adam
from lsq.ops.embedding import Embed, EmbedGradient
from lsq.ops.vocabulary_loss import KeptInputGradient, KeptWeightGradient
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.samples import Sampler
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.run.cuda import AbsentGPU, launched_by_operation

LAYERS = 6
"""Of the encoder, and of the decoder."""
DROPOUT = 0.1
FEW = 4
"""Sentences of the batch whose kernels are counted."""
FEW_WORDS, FEW_INNER = 1024, 64
"""Of the product with the vocabulary, where its kernels are counted."""
BY_WORDS = Embed, EmbedGradient, KeptWeightGradient
"""What looks rows up by words, or adds them up."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Launches of a forward or backward pass, or of the update."""

    name: str
    times: int
    """That it runs in a step."""
    entries: tuple[Launch | Product, ...]
    alike: dict[int, int]
    """By the id of a launch: launches of its key in its operation."""


def step(size: Size, quant: QuantConfig) -> list[Part]:
    """A training step without calibration: its programs and the update of the weights."""
    found = []
    for times, program in training(size, quant):
        with gemm.ended_by(None):
            entries = launched_by_operation(program, torch.float32)
        passes = {
            "forward": entries[: program.forward_length],
            "backward": entries[program.forward_length :],
        }
        found += [
            Part(
                name=f"{program.name} {name}",
                times=times,
                entries=tuple(itertools.chain(*of_pass)),
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
    config, mode = (
        layer_config(size, quant, DROPOUT),
        Mode(training=True, backward=True, backend=AbsentGPU()),
    )
    sentences = PackedSequences(rows=size.tokens, count=size.sentences)
    yield 2, programs.embedding(quant, size.tokens, table(size, DROPOUT), mode)
    yield LAYERS, programs.encoder_layer(config, sentences, mode)
    yield LAYERS, programs.decoder_layer(config, sentences, sentences, mode)
    yield (
        1,
        programs.vocabulary_loss(
            quant, size.tokens, *words(size), mode, padding=PADDING, smoothing=0.1
        ),
    )


def parameters(size: Size, quant: QuantConfig) -> int:
    """Number of parameters; embeddings and the projection to the vocabulary share a table."""
    of_layers = sum(
        times * sum(math.prod(parameter.shape) for parameter in program.parameters)
        for times, program in training(size, quant)
        if program.name.endswith("layer")
    )
    return of_layers + size.vocabulary * size.hidden


def update(size: Size, quant: QuantConfig) -> Part:
    """Adam's two launches, each as if its parameters were one matrix: floats, then weights."""
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
    """An update of a virtual matrix; it rounds to codes where `quant` is given."""

    def tensor(name, *shape, dtype=torch.float32):
        return VirtualTensor(name=name, shape=shape, dtype=dtype)

    names = ("weight", "gradient", "first", "second")
    tensors = {name: tensor(name, rows, columns) for name in names}
    tensors |= {f"new_{name}": tensors[name] for name in names if name != "gradient"}
    if quant is not None:
        clip = tensor("clip", rows)
        tensors["rounded"] = Weight(
            format=quant.weights,
            codes=tensor("codes", rows, columns, dtype=torch.int8),
            scale=tensor("scale", rows),
            clip=clip,
            absmax=not quant.learned,
        )
        tensors["new_clip"] = None if quant.learned else clip
    return Adam(**tensors, numbers=tensor("numbers", NUMBERS), gradient_factor=tensor("factor", 1))


def key_of(entry: Launch) -> str:
    """Equal for launches that do the same for each of their values.

    What an operation does not have is not named, so that a field that operations gain changes no
    key of others. Last come the bytes of a value of each tensor.
    """
    found = [str(entry.kernel)]
    for argument in entry.arguments:
        if isinstance(argument, Operation):
            there = [leaf.name for leaf in argument.leaves() if leaf.of(argument) is not None]
            attributes = {
                name: value
                for name, value in sorted(argument.attributes().items())
                if value
                and not name.endswith(("subsequence", "vocabulary"))
                and not dataclasses.is_dataclass(value)
            }
            found.append(f"{argument.name} of {', '.join(there)}; {attributes}")
        elif argument is None:
            found.append("-")
    widths = (str(tensor.element_size()) for tensor in profile.operands_of(entry))
    return " | ".join([*found, "".join(widths)])


def alike(entries: Iterable[Launch | Product]) -> dict[int, int]:
    """By the id of each launch of an operation: how many of its key there are."""
    keys = {id(entry): key_of(entry) for entry in entries if isinstance(entry, Launch)}
    found = Counter(keys.values())
    return {number: found[key] for number, key in keys.items()}


def counted_alike(size: Size, quant: QuantConfig) -> dict[str, int]:
    """By key: launches of it in an operation with few sentences, where it is counted."""
    with small_grids(size):
        found = [
            launches(operation, "meta", tile_of(size))
            for operation in small_operations(size, quant)
        ]
    return {
        key_of(entry): count
        for one in found
        for entry, count in zip(one, alike(one).values(), strict=True)
    }


@contextlib.contextmanager
def small_grids(size: Size) -> Iterator[None]:
    """Use fewer blocks that sum over rows, so that each has as many rows as in a step."""
    few = few_sentences(size)
    blocks = max(1, geometry.summing_blocks() * few.tokens // size.tokens)
    with mock.patch.object(geometry, "summing_blocks", lambda: blocks):
        yield


def transposed_weights(there: bool) -> contextlib.AbstractContextManager:
    """Build programs for GPUs that keep the codes of weights transposed as well, or do not."""
    return mock.patch.object(AbsentGPU, "transposed_weights", there)


def few_sentences(size: Size) -> Size:
    return dataclasses.replace(size, sentences=min(FEW, size.sentences))


def count_kernels(sizes: Iterable[Size], quant: QuantConfig) -> dict[str, Profile]:
    """By key: counts of each kernel of these models' steps, counted at these batches."""
    best: dict[str, tuple[int, Operation, Size]] = {}
    for size, transposed in itertools.product(sizes, (False, True)):
        with small_grids(size), transposed_weights(transposed):
            for operation in small_operations(size, quant):
                for entry in launches(operation, "meta", tile_of(size)):
                    weight = sum(map(bytes_of, profile.operands_of(entry)))
                    if key_of(entry) not in best or weight < best[key_of(entry)][0]:
                        best[key_of(entry)] = weight, operation, size
    found = {}
    for operation, size in {
        id(chosen): (chosen, size) for _, chosen, size in best.values()
    }.values():
        with small_grids(size):
            entries = launches(operation, "cpu", tile_of(size))
        for entry, counted in zip(entries, profile.profile(entries), strict=True):
            if best[key_of(entry)][1] is operation:
                found.setdefault(key_of(entry), counted)
    return found


def small_operations(size: Size, quant: QuantConfig) -> Iterator[Operation]:
    """Operations of a step with few sentences; sums by words have all, for they scale badly."""
    for _, program in training(few_sentences(size), quant):
        yield from (
            of_few_words(one) for one in program.operations if not isinstance(one, BY_WORDS)
        )
    for _, program in training(size, quant):
        yield from (one for one in program.operations if isinstance(one, BY_WORDS))
    yield from (adam(FEW, size.hidden), adam(64, size.hidden, quant))


def of_few_words(operation: Operation) -> Operation:
    """A product that only tiles end, with fewer words and values, to save time."""
    given = getattr(operation, "prediction", None)
    if given is None or isinstance(operation, KeptInputGradient):
        return operation
    inner = given.x.tensor.shape[1]
    few_of = {given.columns: min(given.columns, FEW_WORDS), inner: min(inner, FEW_INNER)}

    def fewer(tensor):
        return dataclasses.replace(
            tensor, shape=tuple(few_of.get(size, size) for size in tensor.shape)
        )

    few = operation.bind(fewer)
    few.prediction.vocabulary -= given.columns - few.prediction.columns
    return few


def tile_of(size: Size) -> TileConfiguration | None:
    """The tile of logits that the rule takes for the whole step."""
    return default_tile(
        ProductKey(op="vocabulary_loss", m=size.tokens, n=size.padded, k=size.hidden)
    )


def launches(operation: Operation, place: str, tile: TileConfiguration | None) -> list[Launch]:
    """An operation's launches beside products, on random tensors."""
    real = Sampler(place).operation(operation) if place == "cpu" else on_meta(operation)
    with gemm.ended_by(tile if hasattr(operation, "prediction") else None):
        scratch = [
            torch.randint(-999, 999, shape, dtype=dtype)
            if place == "cpu" and dtype == torch.int32
            else torch.zeros(shape, dtype=dtype, device=place)
            for shape, dtype in real.cuda_scratch()
        ]
        return [entry for entry in real.cuda(*scratch) if isinstance(entry, Launch)]


def on_meta(operation: Operation) -> Operation:
    """The operation on tensors that take no memory."""
    made = {}

    def make(tensor):
        if tensor not in made:
            made[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return made[tensor]

    return operation.bind(make)
