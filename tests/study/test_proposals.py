"""Proposals fit the budgets and fill them; a genetic search comes near the best of all mixes."""

import itertools
import random

import numpy
import pytest
import torch

from lsq.study.knapsack import Choice, Item, Problem, exact
from lsq.study.proposals import REPEATS, Widths, evolve, random_search, uniform
from tests.study import mixes
from tests.study.mixes import UsedUp, divergence, every, filled, proposed

METHODS = (random_search, evolve)


def lowered(given, mix, order):
    """Lower one item after another, as long as the mix does not fit."""
    mix = list(mix)
    for number in itertools.cycle(order):
        if given.fits(mix):
            return mix
        mix[number] = max(mix[number] - 1, 0)


def contradictory(seed) -> Problem:
    """What takes less of one resource takes more of the other."""
    numbers = numpy.random.default_rng(seed)
    items = []
    for number in range(4):
        up, down = numpy.sort(numbers.uniform(1, 9, (2, 4)))
        choices = [
            Choice(name=f"{a:.1f}", cost=1.0, takes=(float(a), float(b)))
            for a, b in zip(up, down[::-1], strict=True)
        ]
        items.append(Item(name=str(number), choices=tuple(choices)))
    return Problem(items=tuple(items), budgets=(21.0, 21.0))


@pytest.mark.parametrize("resources", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_mix_is_lowered_one_item_after_another(share, resources):
    numbers = numpy.random.default_rng(1)
    for seed in range(10):
        given = mixes.problem(seed, items=7, resources=resources, share=share)
        widths = Widths(given, (0,) * 7)
        mix, order = numbers.integers(4, size=7).tolist(), numbers.permutation(7).tolist()
        found = widths.fit(mix, order)
        assert found == lowered(given, mix, order) and widths.picked(found) == tuple(found)
        full = widths.fill(found, order)
        assert given.fits(full) and filled(given, tuple(full))
        assert all(a >= b for a, b in zip(full, found, strict=True))
        assert widths.used(full) == pytest.approx(given.takes(full) / numpy.array(given.budgets))


def test_budgets_that_contradict_each_other():
    for seed in range(20):
        given = contradictory(seed)
        fitting = every(given)
        widths = Widths(given, fitting[0])
        for mix in itertools.product(range(4), repeat=4):
            found = widths.picked(widths.fit(widths.ranks(mix), range(4)))
            assert given.fits(found) and (found == mix or mix not in fitting)


def test_choices_that_others_beat_are_left_out():
    choices = [
        Choice(name=name, cost=cost, takes=(takes,))
        for name, cost, takes in (("c", 1, 8), ("worse", 5, 4), ("a", 9, 2), ("b", 4, 4))
    ]
    given = Problem(items=(Item(name="fc1", choices=tuple(choices)),) * 3, budgets=(14.0,))
    widths = Widths(given, (2, 2, 2))
    assert [widths.picked((rank,) * 3)[0] for rank in range(3)] == [2, 3, 0]
    assert widths.ranks((0, 1, 3)) == [2, 1, 1]
    for method in METHODS:
        found = proposed(method, given, given.cost, start=(1, 1, 1))
        assert {2, 3, 0} == {one for mix in found if mix != (3, 3, 3) for one in mix}


@pytest.mark.parametrize("resources", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_proposals_fill_the_budgets(method, resources):
    given = mixes.problem(2, items=9, resources=resources)
    found = proposed(method, given, divergence(given, 2), most=200)
    assert len(found) == 200
    assert all(filled(given, mix) for mix in set(found) - set(uniform(given)))


def test_random_search_proposes_every_mix_that_fills_the_budgets():
    given = mixes.problem(3, items=4)
    found = proposed(random_search, given, most=1000)
    assert sorted(found) == [mix for mix in every(given) if filled(given, mix)]


@pytest.mark.thorough
def test_the_genetic_search_comes_near_the_best():
    shares = []
    for seed in range(5):
        given = mixes.problem(seed, items=6, resources=1 + seed % 2)
        value = divergence(given, seed)
        least = min(map(value, every(given)))
        shares.append(min(map(value, proposed(evolve, given, value, most=120))) / least)
    assert max(shares) <= 1.05 and sum(share == 1 for share in shares) >= 3, shares


def test_the_genetic_search_is_better_than_random_ones_and_than_its_start():
    given = mixes.problem(4, items=18)
    value, start = divergence(given, 4, strength=0.5), exact(given)
    begun, tried = value(start), {}
    for method in METHODS:
        tried[method] = min(map(value, proposed(method, given, value, start=start)))
    assert tried[evolve] < 0.98 * begun and tried[evolve] < 0.9 * tried[random_search]


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_has_its_proposals(method):
    given = mixes.problem(5, items=8)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    one, again, other = (
        proposed(method, given, divergence(given, 5), most=50, seed=seed) for seed in (1, 1, 2)
    )
    assert one == again and one != other and len(one) == 50
    assert before[:2] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())


@pytest.mark.parametrize("method", METHODS)
def test_a_search_ends_where_there_is_nothing_new(method):
    items = mixes.problem(6, items=3, choices=1).items
    assert proposed(method, Problem(items=items, budgets=(1e3,))) == []
    given = mixes.problem(6, items=3, share=1.0)
    assert (3, 3, 3) in proposed(method, given, given.cost, most=10 * REPEATS)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_measurement_raises_ends_a_search(method):
    given, asked = mixes.problem(7), []

    def measure(mix):
        asked.append(mix)
        if len(asked) == 9:
            raise UsedUp
        return 1.0

    with pytest.raises(UsedUp):
        method(given, (0,) * 5, measure, 0)
    assert len(asked) == 9


def test_uniform_mixes():
    given = mixes.problem(8, items=3, share=0.3)
    assert uniform(given) == [(one,) * 3 for one in range(4) if given.fits((one,) * 3)]
    lacking = Item(name="fc2", choices=given.items[0].choices[1:])
    mixed = Problem(items=(*given.items[1:], lacking), budgets=(1e3,))
    assert uniform(mixed) == [(1, 1, 0), (2, 2, 1), (3, 3, 2)]
