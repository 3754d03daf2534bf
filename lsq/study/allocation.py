"""A format for each tensor, so that a model loses least within budgets.

The costs of `lsq sensitivity` are of one tensor at a time; those of several are taken to add up.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

import numpy
from torch import nn

from lsq.config import QuantConfig
from lsq.layers.clips import ClippedModule
from lsq.models.conversion import convert, revert
from lsq.study.costs import Cost, Costs, TensorCosts
from lsq.study.knapsack import ROUNDING, Choice, Item, Problem, exact, greedy, undominated
from lsq.study.resources import ACTIVATION_BITS, SAID, TAKEN, Budget, Multiplication, Taken
from lsq.study.sensitivity import OF_WEIGHTS
from lsq.study.tables import UNLIMITED, fitted
from lsq.study.tensors import ACTIVATION, WEIGHT, chosen_by

RULES: dict[str, Callable[[Cost], float | None]] = {
    "divergence": lambda cost: cost.divergence,
    "loss": lambda cost: cost.cost,
    "second": lambda cost: cost.second,
}
"""What of a Cost is added up."""
METHODS = {"exact": exact, "greedy": greedy}
OTHERS = "int8"
"""Format of tensors that were not measured."""
STEPS = 24
"""Budgets of a front."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What a converted model has as one tensor, by names of weights."""

    weights: tuple[tuple[str, ...], ...]
    """Weights that are one tensor."""
    inputs: tuple[tuple[str, ...], ...]
    """Weights whose products read the same activation."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Weights that have another name in the converted model -> that name."""


def groups_of(model: nn.Module, formats: Collection[str] = (), **options) -> Groups:
    """Return what is one tensor in a model of lsq's layers, or in one that lsq.convert would make.

    Args:
        model: the same afterwards; it may be on the meta device.
        formats: to choose among, since "int4" cannot store some weights.
        **options: of lsq.convert.
    """
    converted = any(isinstance(module, ClippedModule) for module in model.modules())
    if not converted:
        quant = QuantConfig(
            weight_format=next((one for one in OF_WEIGHTS if one in formats), OTHERS)
        )
        convert(model, quant, **{"check": False, **options})
    try:
        weights, inputs = [], []
        for path, module in model.named_modules():
            if isinstance(module, ClippedModule):
                own, read = (
                    [tuple(f"{path}.{one}" if path else one for one in each) for each in names]
                    for names in map(dict.values, module.tensor_names)
                )
                known = {name for names in own for name in names}
                weights += own
                inputs += [tuple(name for name in names if name in known) for names in read]
        return Groups(weights=tuple(weights), inputs=tuple(filter(None, inputs)))
    finally:
        if not converted:
            revert(model)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of a converted model, which has one format."""

    kind: str
    """WEIGHT, or ACTIVATION: the input of products."""
    names: tuple[str, ...]
    """Of the weights that it is made of, or that read it."""


Unit = tuple[Part, ...]
"""Tensors whose formats are chosen together: weights, and the activation that all of them read."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The format of a tensor of a converted model."""

    part: Part
    format: str
    bits: float
    """Of a value, scales included."""
    values: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Formats of the tensors of a model."""

    chosen: tuple[Chosen, ...]
    unmeasured: tuple[str, ...]
    """Weights that are rounded but were not measured, or another one of the same tensor was not:
    these get OTHERS."""
    unrounded: tuple[str, ...]
    """Weights that were measured but are not rounded."""
    rule: str
    takes: dict[str, float]
    """What the model takes, by name in TAKEN."""
    names: Mapping[str, str] = field(default_factory=dict)
    """As in Groups."""

    def of(self, kind: str) -> dict[str, str]:
        """Return the formats of tensors of a kind: name of each weight -> format."""
        return {
            name: one.format
            for one in self.chosen
            if one.part.kind == kind
            for name in one.part.names
        }

    @property
    def weights(self) -> tuple[Chosen, ...]:
        return tuple(one for one in self.chosen if one.part.kind == WEIGHT)

    @property
    def values(self) -> int:
        """Values of the weights."""
        return sum(one.values for one in self.weights)

    @property
    def bits(self) -> float:
        """Mean bits of a weight's value."""
        return math.fsum(one.bits * one.values for one in self.weights) / self.values

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return math.ceil(self.bits * self.values / 8)

    @property
    def cost(self) -> float:
        return math.fsum(one.cost for one in self.chosen)

    def fits(self, budget: Budget) -> bool:
        """Return whether the model takes no more than a budget."""
        limits = budget.limits(self.values).items()
        return all(self.takes[name] <= most * (1 + ROUNDING) for name, most in limits)

    @property
    def quant(self) -> QuantConfig:
        """The configuration of lsq.convert with these formats."""
        return QuantConfig(
            weight_format=self.weight_format, activation_format=self.activation_format
        )

    @property
    def weight_format(self) -> str:
        """The formats as QuantConfig.weight_format takes them."""
        formats = self._named(WEIGHT) | dict.fromkeys(self.unmeasured, OTHERS)
        every = list(formats.values())
        return _text(max(dict.fromkeys(every), key=every.count), formats)

    @property
    def activation_format(self) -> str:
        """The formats as QuantConfig.activation_format takes them."""
        return _text(OTHERS, self._named(ACTIVATION))

    def _named(self, kind: str) -> dict[str, str]:
        """Return `of` by names in the converted model."""
        return {self.names.get(name, name): form for name, form in self.of(kind).items()}

    def table(self, style: str = "simple") -> str:
        """Return a table of formats; style "github" is Markdown."""
        rows = [
            [
                ("input of " if one.part.kind == ACTIVATION else "") + ", ".join(one.part.names),
                *(one.format, f"{one.bits:.2f}", f"{one.cost:.3g}"),
            ]
            for one in self.chosen
        ]
        rows.append(["all", "", f"{self.bits:.2f}", f"{self.cost:.3g}"])
        head = ["tensor", "format", "bits of a value", self.rule]
        width = UNLIMITED if style == "github" else None
        return fitted(rows, head, ("left", "left", "right", "right"), style=style, width=width)


def _text(others: str, formats: Mapping[str, str]) -> str:
    return ",".join([others, *(f"{n}={form}" for n, form in formats.items() if form != others)])


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """A search for formats, from costs of `lsq.study.sensitivity`.

    Args:
        costs: of a finished measurement.
        groups: of `groups_of`: tensors that are one get one format, and other weights are not
            rounded; None: each weight and each input by itself.
        activations: whether inputs of products get formats, too; else they are int8.
        at_least: pattern of names -> the fewest bits of a weight's value.
        formats: those to choose among; None: all that were measured.
        rows: of a step, as in Budget.
        milliseconds: (format, outputs, inputs) -> the time of a product in it; None: not known.
        rule: the costs that are added up, a key of RULES.
        method: a key of METHODS.

    Raises:
        ValueError: an argument is wrong, costs are not finished, or a weight has no format left.
    """

    costs: Costs
    groups: Groups | None = None
    activations: bool = False
    at_least: Mapping[str, float] | None = None
    formats: Sequence[str] | None = None
    rows: int = 1
    milliseconds: Callable[[str, int, int], float] | None = None
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
        if self.activations and not self.costs.of(ACTIVATION):
            raise ValueError(
                "no activations were measured; measure them, too, or choose formats of weights"
            )
        if self.formats is not None:
            unknown = [form for form in self.formats if form not in self.costs.formats]
            if unknown or not self.formats:
                raise ValueError(
                    f"formats are {', '.join(self.formats) or 'none'}; measured were"
                    f" {', '.join(self.costs.formats)}: choose among these, or measure others"
                )
        for pattern, bits in (self.at_least or {}).items():
            if not (math.isfinite(bits) and bits >= 0):
                raise ValueError(f"at least {bits} bits for {pattern!r}: give a number, 0 or more")
            chosen_by([pattern], self._names)
        if not self.units:
            rounded = [name for names in self.groups.weights for name in names]
            raise ValueError(
                f"no weight that was measured, such as {self._names[0]}, is rounded in this model,"
                f" which has {', '.join(rounded[:3])}, ...; give the model that was measured"
            )

    def run(self, budget: Budget) -> Allocation:
        """Return the formats that cost least within a budget.

        Raises:
            ValueError: nothing fits.
            MissingPackage: the exact method lacks scipy.
        """
        return self.allocation(*self.solved(budget))

    @property
    def multiplications(self) -> list[Multiplication]:
        """The products of all units in all formats."""
        every = ((unit, forms) for unit in self.units for forms in self._every(unit))
        return [one for unit, forms in every for one in self._products(unit, forms)]

    def solved(self, budget: Budget) -> tuple[Problem, tuple[int, ...]]:
        """Return the problem of the units under a budget, and its best choices; see `run`."""
        limits = budget.limits(self.values)
        if "milliseconds" in limits and self.milliseconds is None:
            raise ValueError(
                "a budget of milliseconds needs times of products; give an Allocator of"
                " lsq.study.timed, or leave it out"
            )
        if "operations" in limits and self._unseen:
            raise ValueError(
                f"no product with {self._unseen[0]} was seen in the measurement, as in lsq's own"
                " layers;"
                " measure the float model, or leave operations out"
            )
        problem = self._problem(limits)
        picked = METHODS[self.method](problem)
        if picked is None:
            raise ValueError(self._too_small(problem, tuple(limits)))
        return problem, picked

    def allocation(self, problem: Problem, picked: Sequence[int]) -> Allocation:
        """Return the allocation of the choices of these numbers in a `problem` of this search."""
        names = (item.choices[one].name for item, one in zip(problem.items, picked, strict=True))
        return self.of_formats([name.split() for name in names])

    def of_formats(self, formats: Iterable[Sequence[str]]) -> Allocation:
        """Return the allocation of these formats for the parts of each unit."""
        chosen, products = [], []
        for unit, forms in zip(self.units, formats, strict=True):
            products += self._products(unit, forms)
            chosen += map(self._chosen, unit, forms)
        groups = self.groups.weights if self.groups else ()
        rounded = {name for names in groups for name in names}
        given = {name for one in chosen if one.part.kind == WEIGHT for name in one.part.names}
        return Allocation(
            chosen=tuple(chosen),
            unmeasured=tuple(sorted(rounded - given)),
            unrounded=tuple(name for name in self._names if self.groups and name not in rounded),
            rule=self.rule,
            takes={name: self._sum(name, products) for name in self._taken},
            names=self.groups.names if self.groups else {},
        )

    def uniform(self) -> dict[str, Allocation]:
        """Return the allocation of each format for all weights, whatever at_least says; with
        activations, of each pair of a format for weights and one for activations."""
        found = {}
        for pair in itertools.product(self._allowed, repeat=1 + self.activations):
            form = dict(zip((WEIGHT, ACTIVATION), pair, strict=False))
            every = [[form[part.kind] for part in unit] for unit in self.units]
            allowed = all(
                self._cost(part, one) is not None
                for unit, forms in zip(self.units, every, strict=True)
                for part, one in zip(unit, forms, strict=True)
            )
            if allowed:
                found[" ".join(pair)] = self.of_formats(every)
        return found

    def allows(self, allocation: Allocation) -> bool:
        """Return whether all weights have the fewest bits that at_least says, or more."""
        return all(one.format in self._formats(one.part) for one in allocation.chosen)

    def front(self, steps: int = STEPS) -> list[Allocation]:
        """Return allocations for budgets from the least to the most bits of weights."""
        problem = self._problem({"bits": 1.0})
        most = sum(max(c.takes[0] for c in item.choices) for item in problem.items)
        budgets = numpy.linspace(float(problem.least[0]), most, steps) * (1 + 1e-9)
        solved = (replace(problem, budgets=(float(budget),)) for budget in budgets)
        return [self.allocation(one, METHODS[self.method](one)) for one in solved]

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The tensors that get formats."""
        weights = {tensor.name for tensor in self.costs.of(WEIGHT)}
        read = {tensor.name for tensor in self.costs.of(ACTIVATION) if self.activations}
        each = tuple((name,) for name in self._names)
        groups = self.groups or Groups(weights=each, inputs=each)
        whole = (names for names in groups.weights if names and weights.issuperset(names))
        left, units = [Part(kind=WEIGHT, names=names) for names in whole], []
        inputs_of = (tuple(name for name in names if name in read) for names in groups.inputs)
        for names in filter(None, inputs_of):
            inputs = Part(kind=ACTIVATION, names=names)
            reading = [part for part in left if set(part.names) & set(inputs.names)]
            left = [part for part in left if part not in reading]
            if reading:
                units.append((*reading, inputs))
        return (*units, *((part,) for part in left))

    @property
    def values(self) -> int:
        """Values of all weights that get a format."""
        parts = (part for unit in self.units for part in unit if part.kind == WEIGHT)
        return sum(self._values(part) for part in parts)

    def _problem(self, limits: Mapping[str, float]) -> Problem:
        items = tuple(self._item(unit, tuple(limits)) for unit in self.units)
        return Problem(items=items, budgets=tuple(limits.values()))

    def _item(self, unit: Unit, resources: Sequence[str]) -> Item:
        choices = []
        for forms in self._every(unit):
            cost = math.fsum(map(self._cost, unit, forms))
            products = self._products(unit, forms)
            takes = tuple(self._sum(name, products) for name in resources)
            choices.append(Choice(name=" ".join(forms), cost=cost, takes=takes))
        item = Item(name=", ".join(unit[0].names), choices=tuple(choices))
        if len(unit) > 1:  # many, of which few are of use
            kept = sorted(undominated(item))
            item = replace(item, choices=tuple(choices[one] for one in kept))
        return item

    def _every(self, unit: Unit) -> Iterator[tuple[str, ...]]:
        """Return all formats of a unit's parts."""
        return itertools.product(*map(self._formats, unit))

    def _products(self, unit: Unit, forms: Sequence[str]) -> list[Multiplication]:
        widths = {part: self._bits(part, form) for part, form in zip(unit, forms, strict=True)}
        inputs = next((widths[p] for p in unit if p.kind == ACTIVATION), ACTIVATION_BITS)
        made = []
        for part, form in zip(unit, forms, strict=True):
            if part.kind == WEIGHT:
                tensors = self._of(part)
                columns = tensors[0].inputs
                made.append(
                    Multiplication(
                        form=form,
                        outputs=self._values(part) // columns,
                        inputs=columns,
                        weight_bits=widths[part],
                        activation_bits=inputs,
                        rows=tensors[0].rows / self.costs.count,
                    )
                )
        return made

    def _formats(self, part: Part) -> list[str]:
        """Return the formats that a part may have; ValueError if there are none."""
        names = ", ".join(part.names)
        least = [
            bits
            for pattern, bits in (self.at_least or {}).items()
            if part.kind == WEIGHT and any(fnmatchcase(name, pattern) for name in part.names)
        ]
        widths = {form: self._bits(part, form) for form in self._allowed}
        wide = [form for form in widths if widths[form] >= max(least, default=0.0)]
        if not wide:
            raise ValueError(
                f"{names} must have at least {max(least):g} bits, but the formats that were"
                f" measured have up to {max(widths.values()):.3f}; measure a larger one"
            )
        known = [form for form in wide if self._cost(part, form) is not None]
        if not known:
            raise ValueError(
                f"{names}: the costs have no {self.rule} in any format; take another rule (an"
                ' estimate has "second" alone), or measure with a loss that also returns the logits'
                " of its predictions"
            )
        return known

    def _chosen(self, part: Part, form: str) -> Chosen:
        return Chosen(
            part=part,
            format=form,
            bits=self._bits(part, form),
            values=self._values(part),
            cost=self._cost(part, form),
        )

    def _cost(self, part: Part, form: str) -> float | None:
        found = [RULES[self.rule](tensor.formats[form]) for tensor in self._of(part)]
        return None if None in found else math.fsum(found)

    def _bits(self, part: Part, form: str) -> float:
        """Return the bits of a value."""
        taken = (tensor.formats[form].bits * tensor.values for tensor in self._of(part))
        return math.fsum(taken) / self._values(part)

    def _values(self, part: Part) -> int:
        return sum(tensor.values for tensor in self._of(part))

    def _of(self, part: Part) -> list[TensorCosts]:
        return [self._tensors[part.kind, name] for name in part.names]

    @cached_property
    def _unseen(self) -> list[str]:
        """Weights whose products were not seen in the measurement, so their rows are not known."""
        names = (name for unit in self.units for name in unit[0].names)
        return [name for name in names if not self._tensors[WEIGHT, name].rows]

    @cached_property
    def _tensors(self) -> dict[tuple[str, str], TensorCosts]:
        return {(tensor.kind, tensor.name): tensor for tensor in self.costs.tensors}

    @property
    def _allowed(self) -> Sequence[str]:
        return self.costs.formats if self.formats is None else self.formats

    @cached_property
    def _taken(self) -> dict[str, Taken]:
        left_out = {"operations"} if self._unseen else set()
        known = {name: one for name, one in TAKEN.items() if name not in left_out}
        if self.milliseconds is None:
            return known
        times = self.milliseconds
        return {**known, "milliseconds": lambda one, rows: times(one.form, one.outputs, one.inputs)}

    def _sum(self, name: str, products: Iterable[Multiplication]) -> float:
        return math.fsum(self._taken[name](one, self.rows) for one in products)

    @property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self.costs.of(WEIGHT)]

    def _too_small(self, problem: Problem, resources: Sequence[str]) -> str:
        """Say what formats take at least of the resources whose budgets are too small."""
        pairs = zip(resources, problem.least, problem.budgets, strict=True)
        said = [
            [SAID[name](float(taken), self.values) for taken in (most, least)]
            for name, least, most in pairs
            if least > most
        ]
        if not said:
            return "no formats keep to all budgets together; give larger ones"
        given, least = map(" and ".join, zip(*said, strict=True))
        fewer = ", or fewer bits in at_least" if self.at_least else ""
        return (
            f"the budget is {given}, but the formats take {least} at least; give a larger"
            f" budget{fewer}, or measure smaller formats"
        )
