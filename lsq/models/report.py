"""The report of `convert`: what became of each linear layer of a model, as data and as text."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer of a model."""

    name: str
    """As in named_modules; "" is the model itself."""
    inputs: int
    outputs: int
    reason: str | None
    """Why it was left as it is; None: it was converted."""
    within: str | None = None
    """The fused layer that it is a part of."""
    head: bool = False
    """Whether it is the projection onto the vocabulary, whose logits are computed when they are
    read."""
    adapter: bool = False
    """Whether PEFT has put it beside a layer. As text, adapters that are left share a line."""

    @property
    def weights(self) -> int:
        """Number of its weights."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A layer of a model that there is a program for."""

    name: str
    """As in named_modules; "" is the model itself."""
    kind: str
    """The name of its class."""
    reason: str | None
    """Why it is not fused, but its linear layers by themselves; None: it is."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Weights of several linear layers in one parameter, as of experts, which stay floats."""

    name: str
    """As in named_parameters."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every linear layer of a model.

    As text, layers that differ by numbers in their names alone share a line.
    """

    layers: tuple[Layer, ...]
    numbers: str = "in int8"
    """The formats of converted layers in words: see QuantConfig.summary."""
    whole: tuple[Whole, ...] = ()
    """Layers that there is a program for."""
    stacks: tuple[Stack, ...] = ()
    unknown: str | None = None
    """The class of a model of transformers, if there is a program for none of its layers."""

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the layers that run as one program."""
        return tuple(one.name for one in self.whole if one.reason is None)

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the linear layers that were converted."""
        return tuple(layer.name for layer in self.layers if layer.reason is None)

    @property
    def left(self) -> dict[str, str]:
        """Names of the other linear layers -> why they were left."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason is not None}

    def __str__(self) -> str:
        converted = [layer for layer in self.layers if layer.reason is None]
        left = [layer for layer in self.layers if layer.reason is not None]
        part, total = (sum(one.weights for one in layers) for layers in (converted, self.layers))
        share = f", {part:,} of their {total:,} weights ({part / total:.1%})" if total else ""
        lines = [
            f"{len(converted)} of {len(self.layers)} linear layers run {self.numbers}{share}:",
            *_lines(map(_row, converted)),
        ]
        for title, rows in (
            ("left as they are:", map(_row, left)),
            ("stacks of weights, which stay floats:", map(_stack_row, self.stacks)),
            ("whole layers:", map(_whole_row, self.whole)),
        ):
            section = _lines(rows)
            lines += [title, *section] if section else []
        if self.unknown is not None:
            lines.append(
                f"whole layers: none of {self.unknown} is one that lsq knows; linear layers run one"
                " by one"
            )
        return "\n".join(lines)

    __repr__ = __str__


def _row(layer: Layer) -> tuple[str, str, str]:
    if layer.adapter and layer.reason is not None:
        return "PEFT's adapters", "", layer.reason.rpartition(": ")[2]  # whatever their sizes are
    what = "in a fused layer" if layer.within is not None else "with its loss" if layer.head else ""
    return layer.name, f"{layer.inputs} → {layer.outputs}", layer.reason or what


def _stack_row(stack: Stack) -> tuple[str, str, str]:
    return stack.name, " × ".join(map(str, stack.shape)), f"{math.prod(stack.shape):,} weights"


def _whole_row(whole: Whole) -> tuple[str, str, str]:
    return whole.name, whole.kind, f"not fused: {whole.reason}" if whole.reason else "fused"


def _lines(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """A line for all rows that differ by numbers in their names alone."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, *columns in rows:
        pattern = re.sub(r"\b\d+\b", "*", name) or "the model itself"
        names.setdefault((pattern, *columns), []).append(name)
    counts = {
        (every[0] if len(every) == 1 and every[0] else pattern, *columns): len(every)
        for (pattern, *columns), every in names.items()
    }
    widths = [max((len(row[column]) for row in counts), default=0) for column in range(2)]
    return [
        f"  {count:>4} × {name:<{widths[0]}}  {what:<{widths[1]}}  {reason}".rstrip()
        for (name, what, reason), count in counts.items()
    ]
