"""The operations that benchmarks measure: those of the programs of a training, and some that stand
outside programs.

Their tensors are virtual: lsq.program.samples draws real ones for any of them, wherever it runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from unittest import mock

import torch

from lsq import gemm
from lsq.config import LayerConfig, QuantConfig
from lsq.gemm import cpu
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import linear
from lsq.layers.programs import Mode
from lsq.ops import adam
from lsq.ops.adam import Adam
from lsq.ops.calibration import LeastErrorClip
from lsq.ops.gradient_messages import (
    MessageLayout,
    Messages,
    PackGradients,
    SumMessages,
    UnpackGradients,
)
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.run.backends import backend

MODELS = {"base": (512, 2048, 8), "big": (1024, 4096, 16)}
"""Hidden size, inner size of the feed-forward block, heads."""
VOCABULARY, PADDED = 32764, 32768
LENGTH = 32
"""Tokens of a sentence."""
POSITIONS = 1024
PADDING = 1
PROCESSES = 8
"""That exchange gradients."""


@dataclass(frozen=True, kw_only=True)
class Size:
    name: str
    hidden: int
    feed_forward: int
    heads: int
    vocabulary: int = VOCABULARY
    padded: int = PADDED
    sentences: int
    length: int = LENGTH

    @property
    def tokens(self) -> int:
        return self.sentences * self.length


QUICK = Size(
    name="quick",
    hidden=48,
    feed_forward=64,
    heads=3,
    vocabulary=50,
    padded=64,
    sentences=3,
    length=5,
)


def sizes(*tokens: int) -> list[Size]:
    return [
        Size(name=name, hidden=hidden, feed_forward=inner, heads=heads, sentences=count // LENGTH)
        for count in tokens
        for name, (hidden, inner, heads) in MODELS.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation as something calls it."""

    size: Size
    backward: str
    """The backward mode of the training, or "-" outside programs."""
    operation: Operation

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def result(self) -> str:
        """The first output, in words."""
        return repr(self.operation.outputs[0])

    def __str__(self) -> str:
        return f"{self.name}, {self.size.name}, {self.size.tokens} tokens: {self.result}"

    @property
    def signature(self) -> tuple:
        """A key that is equal for calls that do the same work."""
        leaves = (leaf.of(self.operation) for leaf in self.operation.leaves())
        tensors = (
            None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in leaves
        )
        attributes = self.operation.attributes().items()
        return (
            self.name,
            *tensors,
            *(item for item in attributes if "subsequence" not in item[0].split(".")),
        )


def calls(wanted: Sequence[str], size: Size, dropout: float) -> Iterator[Call]:
    """Calls of the named operations (none: all) that differ in their work, both backward modes."""
    seen = set()
    found = [
        Call(size=size, backward=mode, operation=operation)
        for mode in ("int8", "float")
        for program in training(size, QuantConfig(backward=mode), dropout)
        for operation in program.operations
    ]
    found += [Call(size=size, backward="-", operation=operation) for operation in others(size)]
    for call in found:
        if (not wanted or call.name in wanted) and call.signature not in seen:
            seen.add(call.signature)
            yield call


def names() -> set[str]:
    return {call.name for call in calls((), QUICK, 0.1)}


def training(size: Size, quant: QuantConfig, dropout: float) -> Iterator[Program]:
    """Every kind of program of a training step."""
    config = layer_config(size, quant, dropout)
    mode = Mode(training=True, backward=True, backend=backend("reference"))
    sentences = PackedSequences(rows=size.tokens, count=size.sentences)
    yield programs.embedding(quant, size.tokens, table(size, dropout), mode)
    yield programs.encoder_layer(config, sentences, mode)
    yield programs.encoder_layer(layer_config(size, quant, dropout, norm="rms"), sentences, mode)
    yield programs.decoder_layer(config, sentences, sentences, mode)
    gated = layer_config(size, quant, dropout, activation="silu", gated=True)
    yield programs.feed_forward(gated, size.tokens, mode)
    yield linear(quant, size.tokens, size.hidden, size.hidden, mode, bias=True)
    yield programs.vocabulary_loss(
        quant, size.tokens, *words(size), mode, padding=PADDING, smoothing=0.1
    )


def layer_config(size: Size, quant: QuantConfig, dropout: float, **options) -> LayerConfig:
    return LayerConfig(
        hidden=size.hidden,
        heads=size.heads,
        feed_forward=size.feed_forward,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        quant=quant,
        **options,
    )


def table(size: Size, dropout: float) -> programs.Table:
    return programs.Table(
        vocabulary=size.vocabulary,
        hidden=size.hidden,
        positions=POSITIONS,
        padding=PADDING,
        scale=size.hidden**0.5,
        dropout=dropout,
        learned=True,
    )


def words(size: Size) -> tuple[int, int]:
    """Return (words, hidden) of the projection onto the vocabulary."""
    return size.vocabulary, size.hidden


def others(size: Size) -> Iterator[Operation]:
    """Operations outside programs: Adam, clips, and messages of gradients."""
    shape = size.feed_forward, size.hidden
    tensors = {name: _tensor(name, shape) for name in ("weight", "gradient", "first", "second")}
    tensors |= {
        f"new_{name}": _tensor(f"new_{name}", shape) for name in ("weight", "first", "second")
    }
    codes = Weight(
        format=QuantConfig().weights,
        codes=_tensor("codes", shape, torch.int8),
        scale=_tensor("scale", shape[:1]),
        clip=_tensor("clip", shape[:1]),
        transposed=_tensor("transposed", shape[::-1], torch.int8),
    )
    numbers = adam.scalars(1e-3, (0.9, 0.98), 1e-8, 1000)
    yield Adam(**tensors, numbers=numbers, gradient_factor=torch.ones(1), rounded=codes)
    for rows in (shape, shape[::-1], (1, size.tokens * size.hidden)):
        unusable = _tensor("unusable", rows[:1], torch.int64)
        yield LeastErrorClip(
            x=_tensor("x", rows), clip=_tensor("clip", rows[:1]), unusable=unusable
        )
    for dtype in (torch.float32, torch.bfloat16):
        yield from messages(size.feed_forward * size.hidden, dtype)


def messages(values: int, dtype: torch.dtype) -> Iterator[Operation]:
    """Operations of a worker on a bucket of gradients: pack, sum a shard, unpack."""
    layout = MessageLayout.for_values(values, PROCESSES)
    packed = _messages(layout, PROCESSES)
    yield PackGradients(x=_tensor("gradients", (1, values), dtype), messages=packed)
    one = MessageLayout.for_values(layout.length, 1)
    yield SumMessages(messages=packed, factor=1 / PROCESSES, sum=_messages(one))
    x = _tensor("gradients", (values,), dtype)
    yield UnpackGradients(messages=_messages(layout, 1, PROCESSES), x=x)


def _messages(layout: MessageLayout, *copies: int) -> Messages:
    return Messages(
        layout=layout, data=_tensor("messages", (*copies, layout.message_bytes), torch.uint8)
    )


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> VirtualTensor:
    return VirtualTensor(name=name, shape=tuple(shape), dtype=dtype)


def products_of(operation: Operation) -> list[tuple[str, int, int, int]]:
    """(op, m, n, k) of the int8 products of an operation on a CPU."""
    found = []

    def noted(*product: str | int):
        found.append(product)
        return cpu.scratch_for(*product)

    with mock.patch.object(gemm, "scratch_for", noted):
        operation.cpu_scratch()
    return found


def counted(operation: Operation) -> dict[int, tuple[torch.Tensor, int]]:
    """Address -> each tensor that a real operation reads or writes, and how many bytes of it.

    Of a weight its codes count, or its values where there are none; of a table, as many rows as
    there are indices.
    """
    limits = operation.limits()
    found = {}
    for leaf in operation.leaves():
        tensor = leaf.of(operation)
        if tensor is None:
            continue
        holder = leaf.owner(operation)
        if isinstance(holder, Weight) and holder.codes is not None and tensor is holder.values:
            continue
        size = tensor.numel() * tensor.element_size()
        if not leaf.written and len(leaf.path) == 1 and tensor.dim() == 2:
            looked_up = [
                attrgetter(name)(operation).numel()
                for name, end in limits.items()
                if end == len(tensor)
            ]
            size = min(
                [size, *(count * tensor.shape[1] * tensor.element_size() for count in looked_up)]
            )
        found[tensor.data_ptr()] = tensor, size
    return found
