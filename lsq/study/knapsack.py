"""A choice for each of several items that costs least and keeps to all budgets: exact, or greedy.

It is a knapsack problem with a choice of each item (multiple-choice knapsack). I items, C choices,
R resources.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from lsq.extras import require

ROUNDING = 1e-12
"""By which share sums may exceed a budget: they are sums of floats."""
TINY = 1e-300
"""Keeps divisors above zero."""
FEASIBLE = 1e-9
"""By which share a choice may cost more than all of the greedy solution."""
LARGEST = 1e6
"""Costs and budgets are scaled to this number for the solver, whose tolerances of 1e-6 are
absolute."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to make an item."""

    name: str
    cost: float
    takes: tuple[float, ...]
    """How much it takes of each resource, 0 or more."""


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Items of which each gets one choice; raises ValueError for a wrong field."""

    items: tuple[Item, ...]
    budgets: tuple[float, ...]
    """Most of each resource, above 0."""

    def __post_init__(self) -> None:
        for budget in self.budgets:
            if not (math.isfinite(budget) and budget > 0):
                raise ValueError(f"a budget is {budget:g}; it must be a finite number above 0")
        for item in self.items:
            if not item.choices:
                raise ValueError(f"{item.name} has no choices; give one at least")
            for choice in item.choices:
                amounts = (choice.cost, *choice.takes)
                if not all(map(math.isfinite, amounts)) or min(choice.takes, default=0) < 0:
                    taken = ", ".join(f"{one:g}" for one in choice.takes)
                    raise ValueError(
                        f"{choice.name} of {item.name} has the cost {choice.cost:g} and takes"
                        f" {taken}; the cost must be finite, and what it takes 0 or more"
                    )
                if len(choice.takes) != len(self.budgets):
                    raise ValueError(
                        f"{choice.name} of {item.name} takes of {len(choice.takes)} resources, but"
                        f" there are {len(self.budgets)} budgets"
                    )

    def takes(self, picked: Sequence[int]) -> NDArray:
        """Return what the choices of these numbers take together, float64 [R]."""
        taken = [item.choices[one].takes for item, one in zip(self.items, picked, strict=True)]
        return numpy.array(taken, dtype=float).reshape(len(taken), -1).sum(0)

    def cost(self, picked: Sequence[int]) -> float:
        return math.fsum(
            item.choices[one].cost for item, one in zip(self.items, picked, strict=True)
        )

    def fits(self, picked: Sequence[int]) -> bool:
        limits = numpy.array(self.budgets) * (1 + ROUNDING)
        return bool((self.takes(picked) <= limits).all())

    @cached_property
    def least(self) -> NDArray:
        """The least of each resource that any choices take, float64 [R]: each for itself."""
        every = [[min(c.takes[r] for c in item.choices) for item in self.items] for r in self._all]
        return numpy.array(every, dtype=float).sum(1)

    @property
    def _all(self) -> range:
        return range(len(self.budgets))


def greedy(problem: Problem) -> tuple[int, ...] | None:
    """Return good choices, or None if none are found that fit.

    Begin with the choices that take least; then take the steps that save most cost for what they
    take, as long as they fit.
    """
    budgets, every = numpy.array(problem.budgets), [item.choices for item in problem.items]
    takes = numpy.array([one.takes for choices in every for one in choices]) / budgets
    costs = numpy.array([one.cost for choices in every for one in choices])
    sizes = [len(choices) for choices in every]
    firsts = numpy.cumsum([0, *sizes[:-1]])
    items = numpy.arange(len(sizes)).repeat(sizes)  # of each choice
    shares = takes.sum(1)
    order = numpy.lexsort((costs, shares, items))
    now = order[firsts]  # takes least, and costs least of equal ones
    left = 1 + ROUNDING - takes[now].sum(0)
    if numpy.any(left < 0):
        return None
    while True:
        before = now[items]
        saved, more = costs[before] - costs, shares - shares[before]
        possible = (saved > 0) & (takes - takes[before] <= left).all(1)
        worth = numpy.where(more > 0, saved / numpy.maximum(more, TINY), numpy.inf)
        worth[~possible] = 0.0
        best = int(worth.argmax())
        if worth[best] <= 0:
            return tuple(int(one) for one in now - firsts)
        left = left - (takes[best] - takes[before[best]])
        now[items[best]] = best


def exact(problem: Problem, seconds: float = 60.0) -> tuple[int, ...] | None:
    """Return the best choices, found by HiGHS; None if nothing fits.

    Choices that cost more than the greedy solution cannot be in the best one, nor can those that
    another of the item beats in all. What is left is scaled by that solution's cost, since the
    solver's gaps are absolute.

    Args:
        seconds: after these it returns the best choices so far.

    Raises:
        MissingPackage: scipy is missing.
    """
    require("an exact allocation", "study")
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    start = greedy(problem)
    lowest = [min(choice.cost for choice in item.choices) for item in problem.items]
    above = math.inf if start is None else problem.cost(start) - math.fsum(lowest)
    if above <= 0 and start is not None:
        return start
    kept = [
        undominated(item, low + above * (1 + FEASIBLE))
        for item, low in zip(problem.items, lowest, strict=True)
    ]
    left = [
        (number, item.choices[one], item.choices[one].cost - low)
        for number, (item, numbers, low) in enumerate(zip(problem.items, kept, lowest, strict=True))
        for one in numbers
    ]
    items, choices, costs = zip(*left, strict=True)
    unit = above if math.isfinite(above) else max(costs) or 1.0
    of_items = csr_array((numpy.ones(len(left)), (items, range(len(left)))))
    taken = numpy.array([one.takes for one in choices]).T / numpy.array(problem.budgets)[:, None]
    found = milp(
        numpy.array(costs) * LARGEST / unit,
        integrality=numpy.ones(len(left)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(of_items, 1, 1),
            LinearConstraint(taken * LARGEST, -numpy.inf, LARGEST),
        ],
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return start
    picked, first = [], 0
    for numbers in kept:
        picked.append(numbers[int(numpy.argmax(found.x[first : first + len(numbers)]))])
        first += len(numbers)
    better = start is None or problem.cost(picked) <= problem.cost(start)
    return tuple(picked) if problem.fits(picked) and better else start


def undominated(item: Item, most: float = math.inf) -> list[int]:
    """Return the numbers of choices that cost at most `most` and that no other one beats in all."""
    found: list[int] = []
    order = sorted(
        range(len(item.choices)), key=lambda one: (item.choices[one].cost, item.choices[one].takes)
    )
    for number in order:
        choice = item.choices[number]
        beaten = any(
            all(a <= b for a, b in zip(item.choices[other].takes, choice.takes, strict=True))
            for other in found  # which cost no more
        )
        if not beaten and choice.cost <= most:
            found.append(number)
    return found
