"""Costs of formats in loss, tensor by tensor: a table, and a JSON file with fields of `Costs`."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lsq.files import json_file
from lsq.files.json_file import check_choice, check_text, check_whole, shown
from lsq.study.tables import UNLIMITED, fitted
from lsq.study.tensors import ACTIVATION, PLURALS, WEIGHT

FORMAT = "lsq-sensitivity"
VERSION = 3
KINDS = (WEIGHT, ACTIVATION)
LARGEST = 2**53
REMEDY = "give a file of `lsq sensitivity`, or delete it and measure again"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one format in one tensor."""

    bits: float
    """Bits of a value, scales included."""
    cost: float | None
    """Loss with only this tensor in the format, minus loss without it; None: not finite."""
    divergence: float | None
    """Divergence of the predictions from those of the model as it is, in nats of an item; None: not
    measured, or not finite."""
    first: float
    """Sum of gradients times changes of values; may be negative."""
    second: float
    """Half the sum of empirical Fisher information times squared changes."""
    error: float
    """Sum of squared changes over sum of squared values; 0 if both are 0."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not (name in ("cost", "divergence") and value is None):
                check_finite(name, value)
        for name in ("bits", "divergence", "second", "error"):
            if (getattr(self, name) or 0.0) < 0:
                raise ValueError(f"{name} is {shown(getattr(self, name))}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """The costs of all formats in one tensor."""

    name: str
    """Name of the weight; activations have the name of the weight that multiplies them."""
    kind: str
    shape: tuple[int, ...]
    values: int
    """Number of values; for activations, in all batches together."""
    rows: int
    """Rows of the inputs that the weight is multiplied with, in all batches together."""
    transposed: bool
    """Whether columns of the weight, not rows, were cut into blocks."""
    formats: dict[str, Cost]

    @property
    def inputs(self) -> int:
        """K, the values of a row of the input."""
        return self.shape[0 if self.transposed else -1]

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_choice("kind", self.kind, KINDS)
        for name in ("values", "rows"):
            check_whole(name, getattr(self, name), 0, LARGEST)
        check_flag("transposed", self.transposed)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of formats in the tensors of a model; raises ValueError for a wrong field."""

    about: dict[str, Any]
    weights: str
    """SHA-256 of all measured weights."""
    clip: str
    """Method that measured clips of weights; clips of activations are the largest magnitudes."""
    formats: tuple[str, ...]
    loss: float
    count: float
    """Number of items in the mean loss, such as tokens."""
    samples: int
    tensors: tuple[TensorCosts, ...] = ()
    finished: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.about, dict):
            raise ValueError(f"about is {shown(self.about)}; it must be an object")
        for name in ("weights", "clip"):
            check_text(name, getattr(self, name))
        for name in ("loss", "count"):
            check_finite(name, getattr(self, name))
        check_whole("samples", self.samples, 0, LARGEST)
        check_flag("finished", self.finished)
        seen = set()
        for number, tensor in enumerate(self.tensors):
            if (tensor.kind, tensor.name) in seen:
                raise ValueError(
                    f"tensors[{number}] is the {tensor.kind} of {tensor.name}, which stands there"
                    " twice"
                )
            seen.add((tensor.kind, tensor.name))
            if set(tensor.formats) != set(self.formats):
                raise ValueError(
                    f"tensors[{number}].formats has not the names in formats"
                    f" ({', '.join(self.formats)})"
                )

    def of(self, kind: str) -> tuple[TensorCosts, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    def difference(self, other: "Costs") -> str:
        """Return which settings differ from `other`'s, or ""; losses may differ by rounding."""
        different = [
            f"{name}: {getattr(self, name)} before, {getattr(other, name)} now"
            for name in ("about", "weights", "clip", "formats", "count", "samples")
            if getattr(self, name) != getattr(other, name)
        ]
        if not different and not math.isclose(self.loss, other.loss, rel_tol=1e-5):
            return f"loss: {self.loss:g} before, {other.loss:g} now"
        return "; ".join(different)

    def table(self, style: str = "simple") -> str:
        """Return tables of costs, sums and known rank correlations; style "github" is Markdown."""
        parts = [
            f"Loss {self.loss:.4f}, a mean over {self.count:g}; estimates from {self.samples}"
            " gradients."
        ]
        width = UNLIMITED if style == "github" else None
        for kind in filter(self.of, KINDS):
            tensors = self.of(kind)
            rows = [
                [tensor.name, *(_figure(tensor.formats[form].cost) for form in self.formats)]
                for tensor in tensors
            ]
            columns = [[tensor.formats[form].cost for tensor in tensors] for form in self.formats]
            sums = (None if None in column else sum(column) for column in columns)
            rows.append(["sum", *map(_figure, sums)])
            values = sum(tensor.values for tensor in tensors)
            bits = (
                sum(tensor.formats[form].bits * tensor.values for tensor in tensors) / values
                for form in self.formats
            )
            rows.append(["bits of a value", *(f"{each:.2f}" for each in bits)])
            sides = ("left", *("right",) * len(self.formats))
            head = [f"cost of {PLURALS[kind]}", *self.formats]
            parts.append(fitted(rows, head, sides, style=style, width=width))
            rank = correlation(self, kind)
            if not math.isnan(rank):
                text = "Rank correlation of costs with the estimate's second term"
                parts.append(f"{text}: {rank:.3f}.")
        return "\n\n".join(parts)


def _figure(cost: float | None) -> str:
    return "not finite" if cost is None else f"{cost:+.5f}"


def correlation(costs: Costs, kind: str) -> float:
    """Return the rank correlation (Spearman 1904) of second terms and measured costs, or NaN."""
    measured = [
        cost
        for tensor in costs.of(kind)
        for cost in tensor.formats.values()
        if cost.cost is not None
    ]
    if len(measured) < 2:
        return math.nan
    rows = [[cost.cost for cost in measured], [cost.second for cost in measured]]
    ranks = [_ranks(torch.tensor(row, dtype=torch.float64)) for row in rows]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Return ranks; equal values share the mean of theirs."""
    _, group, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[group]


def check_finite(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; it must be true or false")


def write_costs(path: Path, costs: Costs) -> None:
    """Write a file, whole or not at all; OSError if that fails."""
    fields = dataclasses.asdict(costs)
    tensors = list(fields.pop("tensors"))
    json_file.write(path, {"format": FORMAT, "version": VERSION, **fields}, "tensors", tensors)


def read_costs(path: str | Path) -> Costs:
    """Read a file of write_costs; ValueError if it is damaged, or of another kind or version."""
    return json_file.read(Path(path), _costs, REMEDY)


def _costs(content: Any) -> Costs:
    fields = dict(content) if isinstance(content, dict) else {}
    form, version = fields.pop("format", None), fields.pop("version", None)
    if form != FORMAT or version != VERSION:
        raise ValueError(
            f"format and version are {shown(form)} and {shown(version)}; they must be"
            f" {FORMAT!r} and {VERSION}"
        )
    return json_file.record(
        Costs,
        fields,
        "",
        formats=_sequence_of(check_text),
        tensors=lambda value, where: json_file.sequence(value, where, _tensor),
    )


def _sequence_of(check: Callable) -> Callable[[Any, str], tuple]:

    def checked(value: Any, where: str) -> Any:
        check(where, value)
        return value

    return lambda values, where: json_file.sequence(values, where, checked)


def _tensor(value: Any, where: str) -> TensorCosts:
    return json_file.record(
        TensorCosts,
        value,
        where,
        shape=_sequence_of(lambda where, size: check_whole(where, size, 0, LARGEST)),
        formats=_formats,
    )


def _formats(value: Any, where: str) -> dict[str, Cost]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object")
    return {
        name: json_file.record(Cost, cost, json_file.within(where, name))
        for name, cost in value.items()
    }
