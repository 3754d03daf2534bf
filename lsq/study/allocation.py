"""A format for each weight, so that a model loses least within a budget.

The costs of `lsq sensitivity` are of one tensor at a time; those of several are taken to add up.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy
from torch import nn

from lsq.config import QuantConfig
from lsq.layers.in_place import InPlace
from lsq.models.conversion import convert, revert
from lsq.program.tensor import Kind
from lsq.study.costs import Cost, Costs, TensorCosts
from lsq.study.knapsack import Choice, Item, Problem, exact, greedy
from lsq.study.tables import UNLIMITED, fitted
from lsq.study.tensors import WEIGHT, chosen_by

RULES: dict[str, Callable[[Cost], float | None]] = {
    "divergence": lambda cost: cost.divergence,
    "loss": lambda cost: cost.cost,
    "second": lambda cost: cost.second,
}
"""What of a Cost is added up."""
METHODS = {"exact": exact, "greedy": greedy}
OTHERS = "int8"
"""Format of weights that were not measured."""
STEPS = 24
"""Budgets of a front."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The format of weights that are one tensor in a converted model."""

    names: tuple[str, ...]
    format: str
    bits: float
    """Of a value, scales included."""
    values: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Formats of the weights of a model."""

    chosen: tuple[Chosen, ...]
    unmeasured: tuple[str, ...]
    """Weights that are rounded but were not measured, which get OTHERS."""
    unrounded: tuple[str, ...]
    """Weights that were measured but are not rounded."""
    rule: str

    @property
    def values(self) -> int:
        return sum(one.values for one in self.chosen)

    @property
    def bits(self) -> float:
        """Mean bits of a value."""
        return math.fsum(one.bits * one.values for one in self.chosen) / self.values

    @property
    def bytes(self) -> int:
        return math.ceil(self.bits * self.values / 8)

    @property
    def cost(self) -> float:
        return math.fsum(one.cost for one in self.chosen)

    @property
    def weight_format(self) -> str:
        """The formats as QuantConfig.weight_format takes them."""
        formats = {name: one.format for one in self.chosen for name in one.names}
        formats |= dict.fromkeys(self.unmeasured, OTHERS)
        every = list(formats.values())
        others = max(dict.fromkeys(every), key=every.count)
        exceptions = (f"{name}={form}" for name, form in formats.items() if form != others)
        return ",".join([others, *exceptions])

    def table(self, style: str = "simple") -> str:
        """Return a table of formats; style "github" is Markdown."""
        rows = [
            [", ".join(one.names), one.format, f"{one.bits:.2f}", f"{one.cost:.3g}"]
            for one in self.chosen
        ]
        rows.append(["all", "", f"{self.bits:.2f}", f"{self.cost:.3g}"])
        head = ["weight", "format", "bits of a value", self.rule]
        width = UNLIMITED if style == "github" else None
        return fitted(rows, head, ("left", "left", "right", "right"), style=style, width=width)


def weight_groups(model: nn.Module, **options) -> list[tuple[str, ...]]:
    """Return the names of the weights that lsq.convert rounds; those that it joins, together.

    `model` is the same afterwards; it may be on the meta device. `options`: of lsq.convert.
    """
    convert(model, QuantConfig(), **{"check": False, **options})
    try:
        return [
            tuple(f"{path}.{name}" if path else name for name in module.state_names(own))
            for path, module in model.named_modules()
            if isinstance(module, InPlace)
            for own, declared in module.declared.items()
            if declared.kind is Kind.WEIGHT
        ]
    finally:
        revert(model)


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """A search for formats, from costs of `lsq.study.sensitivity`.

    Args:
        costs: of a finished measurement.
        groups: of `weight_groups`: weights of a group get one format, and others are not rounded;
            None: each weight by itself.
        at_least: pattern of names -> the fewest bits of a value.
        rule: the costs that are added up, a key of RULES.
        method: a key of METHODS.

    Raises:
        ValueError: an argument is wrong, costs are not finished, or a weight has no format left.
    """

    costs: Costs
    groups: Sequence[tuple[str, ...]] | None = None
    at_least: Mapping[str, float] | None = None
    rule: str = "divergence"
    method: str = "exact"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("rule", self.rule, RULES),
            ("method", self.method, METHODS),
        ):
            if value not in known:
                allowed = ", ".join(map(repr, known))
                raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
        if not self.costs.finished:
            raise ValueError(
                "the costs are of a measurement that was stopped; let the same `lsq sensitivity`"
                " go on"
            )
        for pattern, bits in (self.at_least or {}).items():
            if not (math.isfinite(bits) and bits >= 0):
                raise ValueError(f"at least {bits} bits for {pattern!r}: give a number, 0 or more")
            chosen_by([pattern], self._tensors)
        if not self.measured_groups:
            raise ValueError("no weight that was measured is rounded by lsq.convert")

    def run(self, *, bits: float | None = None, bytes: float | None = None) -> Allocation:
        """Return the formats that cost least within the budgets, which are of all weights together.

        Args:
            bits: the most mean bits of a value, scales included.
            bytes: the most bytes.

        Raises:
            ValueError: there is no budget, it is no number above 0, or nothing fits.
            MissingPackage: the exact method lacks scipy.
        """
        problem = self.problem(self.limit(bits=bits, bytes=bytes))
        picked = METHODS[self.method](problem)
        if picked is None:
            least = float(problem.least[0])
            raise ValueError(
                f"the formats take {least / self.values:.3f} bits of a value or"
                f" {math.ceil(least / 8):,} bytes at least; give a larger budget, or measure"
                " smaller formats"
            )
        return self.allocation(picked)

    def limit(self, *, bits: float | None = None, bytes: float | None = None) -> float:
        """Return the bits of all weights together that budgets allow; ValueError without one."""
        given = [bits and bits * self.values, bytes and 8 * bytes]
        if given == [None, None]:
            raise ValueError("there is no budget; give bits or bytes")
        return min(each for each in given if each is not None)

    def allocation(self, picked: Sequence[int]) -> Allocation:
        """Return the allocation of the choices of these numbers."""
        items, groups = self.problem(1.0).items, self.measured_groups
        rounded = {name for group in self.groups or groups for name in group}
        chosen = [
            Chosen(
                names=group,
                format=item.choices[one].name,
                bits=item.choices[one].takes[0] / self._values(group),
                values=self._values(group),
                cost=item.choices[one].cost,
            )
            for group, item, one in zip(groups, items, picked, strict=True)
        ]
        return Allocation(
            chosen=tuple(chosen),
            unmeasured=tuple(sorted(rounded - set(self._tensors))),
            unrounded=tuple(name for name in self._tensors if name not in rounded),
            rule=self.rule,
        )

    def uniform(self) -> dict[str, tuple[float, float]]:
        """Return (mean bits, cost) of each format for all weights, whatever at_least says."""
        found, problem = {}, replace(self, at_least=None).problem(1.0)
        for form in self.costs.formats:
            every = [[c for c in item.choices if c.name == form] for item in problem.items]
            if all(every):
                taken = math.fsum(choices[0].takes[0] for choices in every)
                cost = math.fsum(choices[0].cost for choices in every)
                found[form] = taken / self.values, cost
        return found

    def front(self, steps: int = STEPS) -> list[tuple[float, float]]:
        """Return (mean bits, cost) of allocations for budgets from the least to the most bits."""
        problem = self.problem(1.0)
        most = sum(max(c.takes[0] for c in item.choices) for item in problem.items)
        budgets = numpy.linspace(float(problem.least[0]), most, steps) * (1 + 1e-9)
        every = [self.run(bits=float(budget) / self.values) for budget in budgets]
        return [(one.bits, one.cost) for one in every]

    @property
    def _tensors(self) -> dict[str, TensorCosts]:
        return {tensor.name: tensor for tensor in self.costs.of(WEIGHT)}

    @property
    def values(self) -> int:
        """Values of all weights that get a format."""
        return sum(map(self._values, self.measured_groups))

    @property
    def measured_groups(self) -> list[tuple[str, ...]]:
        """The measured weights that are rounded."""
        tensors = self._tensors
        if self.groups is None:
            return [(name,) for name in tensors]
        found = (tuple(name for name in group if name in tensors) for group in self.groups)
        return [group for group in found if group]

    def _values(self, group: Iterable[str]) -> int:
        return sum(self._tensors[name].values for name in group)

    def problem(self, limit: float) -> Problem:
        """Return the problem of measured_groups, whose weights take bits up to a limit."""
        tensors, groups = self._tensors, self.measured_groups
        items = tuple(self._item([tensors[name] for name in group]) for group in groups)
        return Problem(items=items, budgets=(limit,))

    def _item(self, tensors: Sequence[TensorCosts]) -> Item:
        names = ", ".join(tensor.name for tensor in tensors)
        least = [
            bits
            for pattern, bits in (self.at_least or {}).items()
            if any(fnmatchcase(tensor.name, pattern) for tensor in tensors)
        ]
        choices, widths = [], []
        for form in self.costs.formats:
            found = [RULES[self.rule](tensor.formats[form]) for tensor in tensors]
            taken = math.fsum(tensor.formats[form].bits * tensor.values for tensor in tensors)
            widths.append(taken / sum(tensor.values for tensor in tensors))
            if None not in found and widths[-1] >= max(least, default=0.0):
                choices.append(Choice(name=form, cost=math.fsum(found), takes=(taken,)))
        if not choices and max(least, default=0.0) > max(widths):
            raise ValueError(
                f"{names} must have at least {max(least):g} bits, but the formats that were"
                f" measured have up to {max(widths):.3f}; measure a larger one"
            )
        if not choices:
            raise ValueError(
                f"{names} has no {self.rule} in any format; take another rule, or measure with a"
                " loss that also returns the logits of its predictions"
            )
        return Item(name=names, choices=tuple(choices))
