"""Knapsack: brute force over all choices, several budgets, ties, nothing that fits, bad numbers."""

import itertools
import math
import time

import numpy
import pytest

from lsq.study.knapsack import Choice, Item, Problem, exact, greedy
from tests.ops.compare import refused


def problem(seed: int, items=6, choices=4, resources=1, share=0.5, whole=False) -> Problem:
    """Items whose cost falls as they take more; the budget is a share of the way up."""
    random = numpy.random.default_rng(seed)
    made, low, high = [], numpy.zeros(resources), numpy.zeros(resources)
    for number in range(items):
        takes = numpy.sort(random.integers(1, 9, (choices, resources)) * 1.0, axis=0)
        cost = numpy.sort(10.0 ** random.uniform(-6, 0, choices))[::-1]
        if whole:
            cost = random.integers(0, 5, choices) * 1.0
        else:
            takes *= random.uniform(0.9, 1.1, takes.shape)
        low, high = low + takes.min(0), high + takes.max(0)
        every = [
            Choice(name=str(one), cost=float(cost[one]), takes=tuple(map(float, takes[one])))
            for one in range(choices)
        ]
        made.append(Item(name=f"item {number}", choices=tuple(every)))
    return Problem(items=tuple(made), budgets=tuple(map(float, low + share * (high - low))))


def best(given: Problem) -> float:
    every = itertools.product(*(range(len(item.choices)) for item in given.items))
    return min((given.cost(one) for one in every if given.fits(one)), default=math.inf)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("resources", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_exact_solution_is_that_of_brute_force(share, resources, whole):
    for seed in range(5):
        given = problem(seed, resources=resources, share=share, whole=whole)
        expected, found = best(given), exact(given)
        if math.isinf(expected):
            assert found is None
            continue
        assert given.fits(found)
        assert given.cost(found) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_greedy_fits_and_is_no_better():
    for seed in range(20):
        given = problem(seed, resources=1 + seed % 3)
        found = greedy(given)
        assert given.fits(found) and given.cost(found) >= best(given) - 1e-15


def test_a_larger_budget_costs_no_more():
    costs = [given.cost(exact(given)) for given in (problem(3, share=s) for s in (0.1, 0.4, 0.8))]
    assert costs == sorted(costs, reverse=True)


def test_costs_below_zero_and_tiny_ones():
    for seed in range(5):
        given = problem(seed)
        shifted = [
            Item(
                name=item.name,
                choices=tuple(
                    Choice(name=c.name, cost=1e-9 * (c.cost - 0.5), takes=c.takes)
                    for c in item.choices
                ),
            )
            for item in given.items
        ]
        small = Problem(items=tuple(shifted), budgets=given.budgets)
        assert small.cost(exact(small)) == pytest.approx(best(small), rel=1e-6, abs=0)


def test_nothing_fits():
    given = problem(1)
    tight = Problem(items=given.items, budgets=(0.99 * float(given.least[0]),))
    assert exact(tight) is None and greedy(tight) is None


def test_500_layers_of_6_formats_take_less_than_a_second():
    given = problem(1, items=500, choices=6)
    began = time.process_time()
    found = exact(given)
    assert time.process_time() - began < 1.0
    assert given.cost(found) <= given.cost(greedy(given))


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan, math.inf])
def test_budgets_that_are_no_amounts_are_refused(budget):
    with refused("a budget is"):
        Problem(items=problem(1).items, budgets=(budget,))


@pytest.mark.parametrize("cost, takes", [(math.nan, (1.0,)), (1.0, (-1.0,)), (1.0, (math.inf,))])
def test_choices_with_bad_numbers_are_refused(cost, takes):
    item = Item(name="fc1", choices=(Choice(name="int4", cost=cost, takes=takes),))
    with refused("int4 of fc1 has the cost"):
        Problem(items=(item,), budgets=(1.0,))


def test_other_numbers_of_resources_are_refused():
    with refused("takes of 1 resources, but there are 2 budgets"):
        Problem(items=problem(1).items, budgets=(1.0, 1.0))
    with refused("has no choices"):
        Problem(items=(Item(name="fc1", choices=()),), budgets=(1.0,))
