"""DDPG and TD3 learn to propose better mixes, and leave nothing behind."""

import itertools
import random
import sys
import tempfile

import numpy
import pytest
import torch

from lsq import extras
from lsq.study.knapsack import Problem
from lsq.study.proposals import random_search
from lsq.study.reinforcement import LEARNING, ddpg, td3
from tests.study import mixes
from tests.study.mixes import UsedUp, divergence, every, proposed

pytestmark = pytest.mark.thorough  # the package that learns takes seconds to import

METHODS = (ddpg, td3)
LAST = 40


@pytest.mark.parametrize("method", METHODS)
def test_proposals_become_better_than_random_ones(method):
    given = mixes.problem(3, items=9, share=0.5)
    value = divergence(given, 3)
    most = LEARNING["learning_starts"] + 90
    by_chance = numpy.mean([value(mix) for mix in proposed(random_search, given, value, most)])
    found = [value(mix) for mix in proposed(method, given, value, most)]
    assert numpy.mean(found[-LAST:]) < 0.8 * by_chance
    assert numpy.mean(found[-LAST:]) < 0.8 * numpy.mean(found[:LAST])


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_has_its_proposals(method):
    given = mixes.problem(2, items=7, resources=2)
    value = divergence(given, 2)
    one, again, larger, other = (
        proposed(method, given, lambda mix, f=f: f * value(mix), most=90, seed=seed)
        for seed, f in ((1, 1), (1, 1), (1, 1024), (2, 1))
    )
    assert one == again and len(one) == 90
    assert one == larger  # scores are of the divergence's growth
    assert one != other


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_learns_whatever_the_caller_does(context):
    given = mixes.problem(2, items=3)
    before = proposed(ddpg, given, sum, most=60)
    torch.set_default_dtype(torch.float64)
    try:
        with context():
            assert proposed(ddpg, given, sum, most=60) == before
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left_behind(method, monkeypatch, tmp_path):
    given, threads, seen = mixes.problem(3, items=6), torch.get_num_threads(), []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def state() -> tuple:
        numbers = random.getstate(), str(numpy.random.get_state()), torch.get_num_threads()
        return *numbers, torch.get_rng_state().tolist()

    def measure(mix):
        seen.append(state())
        if len(seen) == LEARNING["learning_starts"] + 10:
            raise UsedUp
        return 1.0 + sum(mix)

    torch.set_num_threads(3)
    try:
        before = state()
        with pytest.raises(UsedUp):
            method(given, (0,) * 6, measure, 0)
        assert state() == before and seen == [before] * len(seen)
    finally:
        torch.set_num_threads(threads)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("method", "begun"), [(td3, 0.0), (ddpg, 1.0), (td3, 1e30)])
def test_divergences_may_be_zero_or_huge(method, begun):
    given, values = mixes.problem(4), itertools.cycle((0.0, 1e30, 1.0))
    found = proposed(method, given, lambda mix: next(values) if any(mix) else begun, most=60)
    assert len(found) == 60


@pytest.mark.parametrize("method", METHODS)
def test_a_search_ends_where_there_is_nothing_new(method):
    given = mixes.problem(5, items=2, choices=2)
    assert set(proposed(method, given, given.cost)) <= set(every(given))
    single = Problem(items=mixes.problem(5, choices=1).items, budgets=(1e3,))
    assert proposed(method, single, single.cost) == []


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(extras.MissingPackage, match="DDPG needs stable-baselines3"):
        ddpg(mixes.problem(6), (0,) * 5, len, 0)
