"""What `convert` did with each linear layer of a model, as data and as text."""

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

    @property
    def weights(self) -> int:
        """How many."""
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every linear layer of a model. As text, layers that differ by numbers in their names alone share a line."""

    layers: tuple[Layer, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of those that were."""
        return tuple(layer.name for layer in self.layers if layer.reason is None)

    @property
    def left(self) -> dict[str, str]:
        """Names of the others -> why they were left."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason is not None}

    def __str__(self) -> str:
        converted = [layer for layer in self.layers if layer.reason is None]
        left = [layer for layer in self.layers if layer.reason is not None]
        part, whole = (sum(layer.weights for layer in layers) for layers in (converted, self.layers))
        share = f", {part:,} of their {whole:,} weights ({part / whole:.1%})" if whole else ""
        lines = [f"{len(converted)} of {len(self.layers)} linear layers run in int8{share}:", *_lines(converted)]
        return "\n".join([*lines, *(["left as they are:", *_lines(left)] if left else [])])

    __repr__ = __str__


def _lines(layers: Iterable[Layer]) -> list[str]:
    counts: dict[tuple[str, str, str], int] = {}
    for layer in layers:
        name = re.sub(r"\b\d+\b", "*", layer.name) or "the model itself"
        key = name, f"{layer.inputs} → {layer.outputs}", layer.reason or ""
        counts[key] = counts.get(key, 0) + 1
    widths = [max((len(key[column]) for key in counts), default=0) for column in range(2)]
    return [
        f"  {count:>4} × {name:<{widths[0]}}  {shape:<{widths[1]}}  {reason}".rstrip()
        for (name, shape, reason), count in counts.items()
    ]
