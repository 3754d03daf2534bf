"""Small problems of mixes whose divergences are known, and what a search proposes for them."""

import itertools
from collections.abc import Callable

import numpy

from lsq.study.knapsack import Choice, Item, Problem

Mix = tuple[int, ...]
BITS = (2, 3, 4, 6)


class UsedUp(Exception):
    """No more mixes may be measured."""


def problem(seed: int, items=5, choices=4, resources=1, share=0.4) -> Problem:
    """Items whose choices cost less and take more of every resource, the greater their number."""
    random = numpy.random.default_rng(seed)
    made, low, high = [], numpy.zeros(resources), numpy.zeros(resources)
    for number in range(items):
        widths = numpy.array(BITS[:choices])
        takes = widths[:, None] ** numpy.linspace(1, 1.3, resources) * random.uniform(1, 4)
        costs = 4.0**-widths * 10 ** random.uniform(-1, 1)
        low, high = low + takes[0], high + takes[-1]
        every = zip(widths, costs, takes, strict=True)
        made.append(
            Item(
                name=f"item {number}",
                choices=tuple(
                    Choice(name=f"int{bits}", cost=float(cost), takes=tuple(map(float, taken)))
                    for bits, cost, taken in every
                ),
            )
        )
    return Problem(items=tuple(made), budgets=tuple(map(float, low + share * (high - low))))


def divergence(given: Problem, seed: int, strength=0.2) -> Callable[[Mix], float]:
    """Return the divergence of a mix: its costs, and what each two items add or save together."""
    between = numpy.random.default_rng(seed).uniform(-strength, strength, (len(given.items),) * 2)

    def value(mix: Mix) -> float:
        costs = [item.choices[one].cost for item, one in zip(given.items, mix, strict=True)]
        roots = numpy.sqrt(costs)
        return sum(costs) + float(roots @ (between - numpy.diag(between.diagonal())) @ roots)

    return value


def every(given: Problem) -> list[Mix]:
    """Return all mixes that fit."""
    numbers = (range(len(item.choices)) for item in given.items)
    return [mix for mix in itertools.product(*numbers) if given.fits(mix)]


def filled(given: Problem, mix: Mix) -> bool:
    """Return whether no item can have the next choice."""
    return not any(
        one + 1 < len(item.choices) and given.fits((*mix[:number], one + 1, *mix[number + 1 :]))
        for number, (item, one) in enumerate(zip(given.items, mix, strict=True))
    )


def proposed(method, given: Problem, value=len, most=100, seed=0, start=None) -> list[Mix]:
    """Return the mixes that a method asks for, each once; the start is known beforehand."""
    start = start or (0,) * len(given.items)
    measured = {start: value(start)}

    def measure(mix: Mix) -> float:
        assert given.fits(mix) and all(type(one) is int for one in mix)
        if mix not in measured:
            if len(measured) > most:
                raise UsedUp
            measured[mix] = value(mix)
        return measured[mix]

    try:
        method(given, start, measure, seed)
    except UsedUp:
        pass
    else:
        assert len(measured) <= most + 1
    return list(measured)[1:]
