"""Clips that were measured, and optimizers that put them back."""

import pytest
import torch
from torch import nn

from lsq.layers import QuantizedLinear
from lsq.optim import Adam


class MasterCopy(torch.optim.SGD):
    """Steps on copies of the parameters, and writes these back, as optimizers of mixed precision
    do."""

    def __init__(self, parameters, lr: float):
        self.own = list(parameters)
        super().__init__([nn.Parameter(one.detach().clone()) for one in self.own], lr=lr)

    def step(self, closure=None):
        copies = self.param_groups[0]["params"]
        for copy, own in zip(copies, self.own, strict=True):
            copy.grad = own.grad
        super().step(closure)
        with torch.no_grad():
            for copy, own in zip(copies, self.own, strict=True):
                own.copy_(copy)


def layer() -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear(48, 32)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, passes: int = 1) -> None:
    for step in range(steps):
        net.train()
        for number in range(passes):
            torch.manual_seed(10 * step + number)
            net(torch.randn(7, 48)).square().mean().backward()
        optimizer.step()
        net.zero_grad()


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_an_optimizer_that_puts_measured_clips_back_is_named(passes):
    net = layer()
    optimizer = MasterCopy(net.parameters(), lr=1e-3)
    train(net, optimizer, 1, passes)
    message = (
        r"a pass has measured input_clip as \d\.\d+, and the optimizer's step has put it back to 16"
        r".*Add a line that runs one batch, model\(\*\*batch\), before deepspeed.initialize"
    )
    with pytest.raises(RuntimeError, match=message):
        train(net, optimizer, 1)


@pytest.mark.parametrize("make", [MasterCopy, Adam, torch.optim.AdamW, torch.optim.SGD])
def test_clips_that_were_measured_before_the_copy_stay(make):
    net = layer()
    with torch.no_grad():
        net(torch.randn(7, 48, generator=torch.Generator().manual_seed(0)))
    clip = net.input_clip.item()
    train(net, make(net.parameters(), lr=1e-3), 4, 2)
    assert 0.5 * clip < net.input_clip.item() < 2 * clip


@pytest.mark.parametrize("rate", [1e-3, 1.0])
@pytest.mark.parametrize("make", [Adam, torch.optim.AdamW])
def test_steps_of_any_length_and_states_that_are_loaded_are_no_copies(make, rate):
    net, state = layer(), layer().state_dict()
    optimizer = make(net.parameters(), lr=rate)
    train(net, optimizer, 1, 2)
    net.load_state_dict(state)
    train(net, optimizer, 5, 2)
