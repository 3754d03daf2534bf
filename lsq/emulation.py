"""Runs every CUDA operation in the emulator and compares it with its reference: `lsq doctor --emulate`.

Takes a C++ compiler and no GPU. What it shows: the kernels, the launcher and the calls of products compute what they
should on this machine's compiler. What it cannot show: how fast a GPU is, or that its driver works.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.ops import device
from lsq.program import layers
from lsq.program.program import Program
from lsq.program.samples import border_tensors
from lsq.program.tensor import Operation

FLOAT_LIMIT = 1e-4
"""Largest difference of floats, relative to the largest magnitude."""
CODE_LIMIT = 2e-3
"""Largest share of codes that may differ by one, where a float sum in another order came before the rounding."""


@dataclass(frozen=True, kw_only=True)
class OperationCheck:
    """One call of an operation in the emulator, beside its reference."""

    program: str
    operation: str
    floats: float
    """Largest difference of float results, relative to the largest magnitude; infinity where other places are NaN."""
    integers: float
    """Share of codes and bits that differ; infinity where codes differ by more than one."""

    @property
    def agrees(self) -> bool:
        return self.floats <= FLOAT_LIMIT and self.integers <= CODE_LIMIT


def programs() -> list[Program]:
    """Small programs that run every operation of training in all modes."""
    found = []
    for quant, activation in (
        (QuantConfig(backward="int8"), "relu"),
        (QuantConfig(backward="float", clip_gradient="lsq"), "gelu"),
        (QuantConfig(mode="float"), "relu"),
    ):
        config = LayerConfig(
            hidden=48, heads=3, feed_forward=112, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1,
            activation=activation, quant=quant,
        )  # fmt: skip
        words = 96 if quant.quantized else 91
        found += [
            layers.decoder_layer(config, 3, 7, 9, True, True, True, True),
            layers.vocabulary_loss(quant, 41, config.hidden, 91, words, 1, 0.1, True, True),
            layers.embedding(quant, 3, 5, 11, config.hidden, 9, 1, 2.0, 0.1, True, True, True),
        ]
    return found


def checks() -> Iterator[OperationCheck]:
    """Run every operation of every program.

    Raises:
        RuntimeError: there is no C++ compiler, or a kernel fails.
    """
    for program in programs():
        values = border_tensors(program)
        for operation in program.operations:
            inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
            expected = operation.definition.reference(*inputs, **operation.attributes)
            found = _emulate(operation, inputs)
            values.update((t, wanted) for t, wanted in zip(operation.outputs, expected, strict=True) if t is not None)
            pairs = [pair for pair in zip(found, expected, strict=True) if pair[0] is not None]
            floats = [pair for pair in pairs if pair[1].dtype.is_floating_point]
            integers = [pair for pair in pairs if not pair[1].dtype.is_floating_point]
            yield OperationCheck(
                program=program.name, operation=operation.name,
                floats=max((_of_floats(*pair) for pair in floats), default=0.0),
                integers=max((_of_integers(*pair) for pair in integers), default=0.0),
            )


def _emulate(operation: Operation, inputs) -> list[torch.Tensor | None]:
    outputs = [None if t is None else torch.full(t.shape, 85, dtype=t.dtype) for t in operation.outputs]
    target = device.emulated()
    device.prepare(target, operation.definition, inputs, outputs, **operation.attributes).run()
    return outputs


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
