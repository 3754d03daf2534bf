"""Searches for mixes of choices by reinforcement learning: DDPG and TD3 of stable-baselines3.

A step proposes a whole mix. Its action has a number from -1 to 1 for each item, the actor's with
Ornstein-Uhlenbeck noise, and equal parts of that range stand for the item's ranks (Widths); ranks
that do not fit are lowered, one item after another. The next state is the score of that mix, and
the share that it takes of each budget; episodes begin with zeros, and have as many steps as actions
have numbers. The score is log(divergence of the start / divergence of the mix), which is of order 1
for every model, and the reward is REWARD times the score.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from lsq.extras import require
from lsq.study.knapsack import TINY, Problem
from lsq.study.proposals import Finished, Measure, Picked, Proposals, Widths

REWARD = 0.1
HIGHEST = 5.0
"""Scores are clamped to this magnitude."""
NOISE, RETURN = 0.2, 0.15
"""Of the Ornstein-Uhlenbeck process: standard deviation of a step, and share that it returns."""
LEARNING = {
    "learning_starts": 50,  # steps with random actions
    "buffer_size": 10_000,
    "batch_size": 64,
    "learning_rate": 1e-3,
    "tau": 0.01,
    "gamma": 0.99,
    "train_freq": 1,
    "gradient_steps": 1,
}
"""Options of stable-baselines3."""
LAYERS = (64, 64)
"""Widths of the hidden layers of actors and critics."""


def ddpg(problem: Problem, start: Picked, measure: Measure, seed: int) -> None:
    """Propose mixes of DDPG's actor, until `measure` raises or nothing new comes."""
    _learn("DDPG", problem, start, measure, seed)


def td3(problem: Problem, start: Picked, measure: Measure, seed: int) -> None:
    """Propose mixes of TD3's actor, until `measure` raises or nothing new comes."""
    _learn("TD3", problem, start, measure, seed)


def _learn(method: str, problem: Problem, start: Picked, measure: Measure, seed: int) -> None:
    require(f"a search by {method}", "reinforcement")
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

    outside = _Globals(seed)

    def measured(mix: Picked) -> float:
        with outside.exchanged():
            return measure(mix)

    count, widths, propose = len(problem.items), Widths(problem, start), Proposals(measured)

    class Mixes(gymnasium.Env):
        action_space = gymnasium.spaces.Box(-1, 1, (count,), seed=seed)
        observation_space = gymnasium.spaces.Box(-HIGHEST, HIGHEST, (1 + len(problem.budgets),))

        def reset(self, **_: Any) -> tuple[numpy.ndarray, dict]:
            self.steps = 0
            return numpy.zeros(self.observation_space.shape, numpy.float32), {}

        def step(self, action: numpy.ndarray) -> tuple[numpy.ndarray, float, bool, bool, dict]:
            wanted = ((action + 1) / 2 * widths.counts).astype(int)
            ranks = widths.fit(wanted.clip(0, widths.counts - 1), range(count))
            divergence = propose(widths.picked(ranks))
            score = reference - math.log(max(divergence, TINY))
            score = min(max(score, -HIGHEST), HIGHEST)
            self.steps += 1
            state = numpy.array([score, *widths.used(ranks)], numpy.float32)
            return state, REWARD * score, False, self.steps == count, {}

    noise = OrnsteinUhlenbeckActionNoise(
        numpy.zeros(count), numpy.full(count, NOISE), theta=RETURN, dt=1.0
    )
    with torch.inference_mode(False), outside.exchanged():
        reference = math.log(max(propose(start), TINY))
        agent = getattr(stable_baselines3, method)(
            "MlpPolicy",
            Mixes(),
            action_noise=noise,
            policy_kwargs={"net_arch": list(LAYERS)},
            device="cpu",
            **LEARNING,
        )
        agent.set_logger(Logger(None, []))  # its own makes a folder
        try:
            agent.learn(sys.maxsize)
        except Finished:
            return


class _Globals:
    """Random numbers, threads and the default dtype, which stable-baselines3 shares with the rest
    of the process.

    One thread is many times as fast as several in networks as small as these.
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        numbers = generator.get_state(), numpy.random.RandomState(seed).get_state()
        self._other = *numbers, 1, torch.float32

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Exchange what is in use and what is kept, here and at the end."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        numbers = torch.get_rng_state(), numpy.random.get_state()
        now = *numbers, torch.get_num_threads(), torch.get_default_dtype()
        torch.set_rng_state(self._other[0])
        numpy.random.set_state(self._other[1])
        torch.set_num_threads(self._other[2])
        torch.set_default_dtype(self._other[3])
        self._other = now
