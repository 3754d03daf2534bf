"""Runs every CUDA operation in the emulator and compares it with its reference: `lsq doctor
--emulate`.

Takes a C++ compiler and no GPU. What it shows: the kernels, the launcher and the calls of products
compute what they should on this machine's compiler. What it cannot show: how fast a GPU is, or that
its driver works.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lsq.config import LayerConfig, QuantConfig, RelativeBias, Rotary
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode, Table, Vocabulary
from lsq.ops.rounding import RoundWeight
from lsq.ops.sums import FinishSums, PartialSums
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.samples import border_tensors
from lsq.program.tensor import VirtualTensor
from lsq.run.backends import backend

FLOAT_LIMIT = 1e-4
"""Largest difference of floats, relative to the largest magnitude."""
CODE_LIMIT = 2e-3
"""Largest share of codes that may differ by one, where a float sum in another order came before the
rounding."""


@dataclass(frozen=True, kw_only=True)
class OperationCheck:
    """One call of an operation in the emulator, beside its reference."""

    program: str
    operation: str
    floats: float
    """Largest difference of float results, relative to the largest magnitude; infinity where other
    places are NaN."""
    integers: float
    """Share of codes and bits that differ; infinity where codes differ by more than one."""

    @property
    def agrees(self) -> bool:
        return self.floats <= FLOAT_LIMIT and self.integers <= CODE_LIMIT


def trained() -> list[Program]:
    """Small programs that run every operation of training in all modes, as a GPU has them."""
    found = []
    for quant, activation, norm in (
        (QuantConfig(backward="int8"), "relu", "layer"),
        (QuantConfig(backward="float", clip_gradient="lsq"), "gelu", "rms"),
        (QuantConfig(mode="float"), "relu", "layer"),
    ):
        config = LayerConfig(
            hidden=48,
            heads=3,
            feed_forward=112,
            dropout=0.1,
            attention_dropout=0.1,
            activation_dropout=0.1,
            activation=activation,
            norm=norm,
            quant=quant,
        )
        mode = Mode(training=True, backward=True, backend=backend("emulated"))
        words = Vocabulary(words=91, hidden=config.hidden, padded=96 if quant.quantized else 91)
        table = Table(
            vocabulary=11,
            hidden=config.hidden,
            positions=9,
            padding=1,
            scale=2.0,
            dropout=0.1,
            learned=True,
        )
        gated = replace(config, activation="silu", gated=True, bias=False)
        found += [
            programs.feed_forward(gated, 21, mode),
            programs.linear(quant, 21, config.hidden, 32, mode, bias=True),
            programs.decoder_layer(
                config, PackedSequences(rows=21, count=3), PackedSequences(rows=27, count=3), mode
            ),
            programs.vocabulary_loss(quant, 41, words, mode, padding=1, smoothing=0.1),
            programs.embedding(quant, 15, table, mode),
        ]
    turned = turning(LayerConfig(hidden=48, heads=3, feed_forward=112))
    return [
        *found,
        programs.self_attention(turned, PackedSequences(rows=21, count=3), mode, causal=True),
    ]


def turning(config: LayerConfig) -> LayerConfig:
    """The same with grouped queries, norms of heads, rotary embeddings, a window and biases by
    distance."""
    return replace(
        config,
        kv_heads=1,
        rotary=Rotary(places=9),
        qk_norm=1e-6,
        window=5,
        relative_bias=RelativeBias(buckets=8, farthest=6),
    )


def checks() -> Iterator[OperationCheck]:
    """Run every operation of every program, and before them those that round its weights.

    Raises:
        RuntimeError: there is no C++ compiler, or a kernel fails.
    """
    for program in trained():
        values = border_tensors(program)
        weights = [
            RoundWeight(weight=weight)
            for weight in program.weights.values()
            if weight.codes is not None
        ]
        finishing = [
            operation for operation in program.operations if isinstance(operation, FinishSums)
        ]
        sums = {one.parts: one for operation in finishing for one in operation.sums}
        for operation in (*weights, *program.operations):
            expected, found = (_run(name, operation, values) for name in ("reference", "emulated"))
            values.update(zip(operation.outputs, expected, strict=True))
            pairs = _comparable(operation.outputs, found, expected, sums)
            floats = [pair for pair in pairs if pair[1].dtype.is_floating_point]
            integers = [pair for pair in pairs if not pair[1].dtype.is_floating_point]
            yield OperationCheck(
                program=program.name,
                operation=operation.name,
                floats=max((_of_floats(*pair) for pair in floats), default=0.0),
                integers=max((_of_integers(*pair) for pair in integers), default=0.0),
            )


def _run(
    name: str, operation: Operation, values: dict[VirtualTensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What an operation writes on the backend of that name, in memory of its own, over what is
    written there before."""
    made = {
        tensor: values[tensor].clone()
        if tensor in values
        else torch.full(tensor.shape, 85, dtype=tensor.dtype)
        for tensor in operation.outputs
    }
    bound = operation.bind(lambda tensor: made[tensor] if tensor in made else values[tensor])
    backend(name).run(bound)
    return bound.outputs


def _comparable(
    tensors: Sequence[VirtualTensor],
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    sums: Mapping[VirtualTensor, PartialSums],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs that are to be equal: of sums over rows that are left in parts, the totals."""
    pairs = []
    for tensor, *pair in zip(tensors, found, expected, strict=True):
        if tensor in sums:
            totals = (replace(sums[tensor], parts=parts).totals() for parts in pair)
            outs = sums[tensor].outs
            pairs += [both for out, *both in zip(outs, *totals, strict=True) if out is not None]
        else:
            pairs.append(pair)
    return pairs


def _of_floats(found: torch.Tensor, wanted: torch.Tensor) -> float:
    usable = wanted.isfinite()
    if not torch.equal(found.isfinite(), usable):
        return float("inf")
    if not usable.any():
        return 0.0
    difference = (found - wanted)[usable].abs().max().item()
    return difference / max(wanted[usable].abs().max().item(), 1e-6)


def _of_integers(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.numel() or torch.equal(found, wanted):
        return 0.0
    if wanted.dtype == torch.int8 and (found.int() - wanted.int()).abs().max() > 1:
        return float("inf")
    differing = int((found != wanted).sum())
    return differing / wanted.numel() if differing > 1 else 0.0
