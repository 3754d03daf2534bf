"""What formats cost in loss, tensor by tensor, as a file for programs: a search for a mix of bits
begins with it.

The file is a JSON object with the fields of `Costs`, whose docstrings say what they mean;
docs/numbers.md shows one.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsq.files import json_file
from lsq.files.json_file import check_choice, check_text, check_whole, shown
from lsq.study.tensors import ACTIVATION, WEIGHT

FORMAT = "lsq-sensitivity"
VERSION = 1
KINDS = (WEIGHT, ACTIVATION)
LARGEST = 2**53
REMEDY = "give a file of `lsq sensitivity`, or delete it and measure again"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one tensor in one format.

    Raises:
        ValueError: a field is no finite number, or is below 0 where it cannot be.
    """

    bits: float
    """Of a value, scales counted."""
    cost: float | None
    """The loss with this tensor alone in the format, minus the loss without.

    None: the loss was not finite.
    """
    first: float
    """The first term of the estimate: gradients times changes of values, summed. Of either sign."""
    second: float
    """The second term: half of the empirical Fisher information times squared changes, summed."""
    error: float
    """Squared changes in parts of squared values; 0 where both are 0. -10 log10 of it is the
    signal-to-noise in dB."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not (name == "cost" and value is None):
                check_finite(name, value)
        for name in ("bits", "second", "error"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {shown(getattr(self, name))}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """Of one tensor in all formats.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    name: str
    """Of the weight, as the model's parameters are named.

    Activations have that of the weight that they meet.
    """
    kind: str
    """"weight", or "activation": what products with it read."""
    shape: tuple[int, ...]
    """Of the parameter."""
    values: int
    """How many there are; of activations, in all batches together."""
    transposed: bool
    """Whether the columns of a weight were cut into blocks, since products sum over its rows."""
    formats: dict[str, Cost]
    """By the names of lsq.quant.numbers.scaled_format."""

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_choice("kind", self.kind, KINDS)
        check_whole("values", self.values, 0, LARGEST)
        check_flag("transposed", self.transposed)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of the tensors of a model.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    about: dict[str, Any]
    """What was measured, in the words of who did: the model, its batches, the unit of the loss."""
    weights: str
    """SHA-256 of all weights that were measured."""
    clip: str
    """How clips of weights were measured; those of activations are the largest values."""
    formats: tuple[str, ...]
    loss: float
    """Of the model as it is, a mean over all batches."""
    count: float
    """What that is a mean of: tokens, say."""
    samples: int
    """How many gradients the estimate is of."""
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
        """The tensors of one kind."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    def difference(self, other: "Costs") -> str:
        """What of the settings differs from another's, in words; "" for nothing.

        Losses may differ by rounding.
        """
        found = [
            f"{name}: {getattr(self, name)} before, {getattr(other, name)} now"
            for name in ("about", "weights", "clip", "formats", "count", "samples")
            if getattr(self, name) != getattr(other, name)
        ]
        if not found and not math.isclose(self.loss, other.loss, rel_tol=1e-5):
            found = [f"loss: {self.loss:g} before, {other.loss:g} now"]
        return "; ".join(found)


def check_finite(name: str, value: object) -> None:
    """Refuse what is no finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; it must be true or false")


def write_costs(path: Path, costs: Costs) -> None:
    """Write the file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    fields = dataclasses.asdict(costs)
    tensors = list(fields.pop("tensors"))
    json_file.write(path, {"format": FORMAT, "version": VERSION, **fields}, "tensors", tensors)


def read_costs(path: Path) -> Costs:
    """Read a file that write_costs wrote.

    Raises:
        ValueError: it is damaged, or another file, or of another version.
        OSError: it cannot be read.
    """
    return json_file.read(path, _costs, REMEDY)


def _costs(content: Any) -> Costs:
    fields = content if isinstance(content, dict) else {}
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise ValueError(
            f"format and version are {shown(fields.get('format'))} and"
            f" {shown(fields.get('version'))}; they must be "
            f"{FORMAT!r} and {VERSION}"
        )
    fields = {name: value for name, value in fields.items() if name not in ("format", "version")}
    return json_file.record(
        Costs,
        fields,
        "",
        formats=lambda value, place: json_file.sequence(value, place, _text),
        tensors=lambda value, place: json_file.sequence(value, place, _tensor),
    )


def _text(value: Any, place: str) -> str:
    check_text(place, value)
    return value


def _size(value: Any, place: str) -> int:
    check_whole(place, value, 0, LARGEST)
    return value


def _tensor(value: Any, place: str) -> TensorCosts:
    return json_file.record(
        TensorCosts,
        value,
        place,
        shape=lambda sizes, place: json_file.sequence(sizes, place, _size),
        formats=_formats,
    )


def _formats(value: Any, place: str) -> dict[str, Cost]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {shown(value)}; it must be an object")
    return {
        name: json_file.record(Cost, cost, json_file.within(place, name))
        for name, cost in value.items()
    }
