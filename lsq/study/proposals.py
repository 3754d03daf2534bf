"""Searches that propose whole mixes of choices, which the caller measures: random ones, and a
genetic search. What fits the budgets is found here for every search."""

from collections.abc import Callable, Iterable, Sequence

import numpy
from numpy.typing import NDArray

from lsq.study.knapsack import ROUNDING, Problem, undominated

Picked = tuple[int, ...]
"""Number of the chosen Choice of each Item."""
Measure = Callable[[Picked], float]
"""Returns the divergence of a mix that fits, 0 or more; raises an exception to end the search."""
REPEATS = 300
"""A search ends after so many proposals in succession that it has made before."""
POPULATION = 8
"""Mixes that the genetic search keeps: the best ones."""
CROSSED = 0.5
"""Share of its children that have two parents."""
RIVALS = 4
"""Mixes that are drawn for a parent, which is the best of them."""


class Widths:
    """The choices of each item from the narrowest to the widest: ranks, which begin at 0.

    Wide is what takes much, summed over the budgets' shares. Choices that another of the item beats
    in all have no rank.
    """

    def __init__(self, problem: Problem, within: Picked):
        """`within`: a mix that fits."""
        budgets = numpy.array(problem.budgets)
        self._all = [
            numpy.array([one.takes for one in item.choices]).reshape(-1, len(budgets)) / budgets
            for item in problem.items
        ]
        self._numbers = [
            sorted(undominated(item), key=lambda one, shares=shares: shares[one].sum())
            for item, shares in zip(problem.items, self._all, strict=True)
        ]
        self._shares = [a[n] for a, n in zip(self._all, self._numbers, strict=True)]
        self.counts = numpy.array([len(numbers) for numbers in self._numbers])
        self._within = self.ranks(within)

    def ranks(self, picked: Picked) -> list[int]:
        """Return ranks of choices, or for one without a rank the widest that takes no more."""
        return [
            int(numpy.flatnonzero((shares <= every[one]).all(1))[-1])
            for shares, every, one in zip(self._shares, self._all, picked, strict=True)
        ]

    def picked(self, ranks: Iterable[int]) -> Picked:
        return tuple(n[rank] for n, rank in zip(self._numbers, ranks, strict=True))

    def used(self, ranks: Iterable[int]) -> NDArray:
        """Return the shares of the budgets that are used, float64 [R]."""
        return numpy.sum([s[rank] for s, rank in zip(self._shares, ranks, strict=True)], axis=0)

    def fit(self, ranks: Sequence[int], order: Sequence[int]) -> list[int]:
        """Return ranks that fit: while they do not, lower the items one by one in this order.

        An item that would only trade one budget for another stays. If that is all that is left,
        items become as in the mix that fits, in this order.
        """
        ranks, used, moved = list(map(int, ranks)), self.used(ranks), True
        while _excess(used) and moved:
            moved = False
            for number in order:
                shares, rank = self._shares[number], ranks[number]
                if not rank:
                    continue
                less = used + (shares[rank - 1] - shares[rank])
                if _excess(less) <= _excess(used):
                    ranks[number], used, moved = rank - 1, less, True
                    if not _excess(used):
                        break
        for number in order:
            if not _excess(self.used(ranks)):
                break
            ranks[number] = self._within[number]
        return ranks

    def fill(self, ranks: Sequence[int], order: Sequence[int]) -> list[int]:
        """Raise the items one by one in this order, until none can be raised and fit."""
        ranks, used, moved = list(ranks), self.used(ranks), True
        while moved:
            moved = False
            for number in order:
                shares, rank = self._shares[number], ranks[number]
                if rank + 1 < len(shares):
                    more = used + (shares[rank + 1] - shares[rank])
                    if not _excess(more):
                        ranks[number], used, moved = rank + 1, more, True
        return ranks

    def filled(self, ranks: Sequence[int], random: numpy.random.Generator) -> Picked:
        """Return the choices of ranks that are made to fit and fill the budgets."""
        fitting = self.fit(ranks, random.permutation(len(ranks)))
        return self.picked(self.fill(fitting, random.permutation(len(ranks))))


def _excess(used: NDArray) -> float:
    """Return by how much the budgets are exceeded together."""
    return float(numpy.maximum(used - (1 + ROUNDING / 2), 0).sum())


class Finished(Exception):
    """A search has nothing new to propose."""


class Proposals:
    """Measures a search's mixes; raises Finished after too many that it knows."""

    def __init__(self, measure: Measure):
        self.known: dict[Picked, float] = {}
        self._measure, self._repeats = measure, 0

    def __call__(self, mix: Picked) -> float:
        self._repeats = self._repeats + 1 if mix in self.known else 0
        if self._repeats > REPEATS:
            raise Finished
        if not self._repeats:
            self.known[mix] = self._measure(mix)
        return self.known[mix]


def uniform(problem: Problem) -> list[Picked]:
    """Return the mixes of choices of one name that fit."""
    names = dict.fromkeys(choice.name for item in problem.items for choice in item.choices)
    found = []
    for name in names:
        every = [[n for n, c in enumerate(i.choices) if c.name == name] for i in problem.items]
        if all(every) and problem.fits([numbers[0] for numbers in every]):
            found.append(tuple(numbers[0] for numbers in every))
    return found


def random_search(problem: Problem, start: Picked, measure: Measure, seed: int) -> None:
    """Propose random mixes that fill the budgets, until `measure` raises or all are known."""
    random = numpy.random.default_rng(seed)
    widths, propose = Widths(problem, start), Proposals(measure)
    try:
        while True:
            propose(widths.filled(random.integers(widths.counts), random))
    except Finished:
        return


def evolve(problem: Problem, start: Picked, measure: Measure, seed: int) -> None:
    """Propose mixes as a genetic search does, until `measure` raises or nothing new comes.

    The first ones are `start` and uniform ones. Each further one has the ranks of a good mix, or
    each item's of one of two, of which a few go up or down by one; then it is made to fit and to
    fill the budgets.
    """
    random = numpy.random.default_rng(seed)
    widths, propose = Widths(problem, start), Proposals(measure)

    def parent() -> NDArray:
        kept = sorted(propose.known, key=propose.known.__getitem__)[:POPULATION]
        return numpy.array(widths.ranks(kept[random.integers(len(kept), size=RIVALS).min()]))

    try:
        for mix in dict.fromkeys((start, *uniform(problem))):
            propose(mix)
        while True:
            child = parent()
            if random.random() < CROSSED:
                child = numpy.where(random.random(len(child)) < 0.5, child, parent())
            changed = random.random(len(child)) < 1 / len(child)
            changed[random.integers(len(child))] = True
            child = child + changed * random.choice((-1, 1), len(child))
            propose(widths.filled(child.clip(0, widths.counts - 1), random))
    except Finished:
        return
