"""Weights that train as codes in several processes."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lsq
from lsq.dist import GradientConfig, compress_gradients
from lsq.optim import Adam
from tests.dist.processes import run


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64))
    lsq.convert(made)
    lsq.train_codes(made)
    return made


def train(rank: int, mode: str | None) -> tuple[list[float], list[torch.Tensor]]:
    """(losses, parameters)"""
    model = net(seed=rank)
    wrapped = DistributedDataParallel(model)
    if mode is not None:
        compress_gradients(wrapped, GradientConfig(mode=mode))
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8)
    chance = torch.Generator().manual_seed(10 + rank)
    losses = []
    for _ in range(20):
        x = torch.randn(32, 64, generator=chance)
        loss = (wrapped(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("mode", [None, "int8"])
def test_codes_are_the_same_in_all_processes(mode):
    (losses, parameters), (_, others) = run(train, 2, mode)
    assert losses[-1] < 0.9 * losses[0]
    assert all(map(torch.equal, parameters, others))


def step_inside(rank: int) -> str:
    model = net(seed=0)
    wrapped = DistributedDataParallel(model)
    optimizer = Adam(model.parameters(), moment_bits=8).step_in_backward()
    try:
        wrapped(torch.randn(4, 64)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return f"no error, {optimizer.backward}"


def test_steps_in_the_backward_pass_are_refused():
    for message in run(step_inside, 2):
        assert "the gradients of the other 1 processes" in message
