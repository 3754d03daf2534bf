"""Logits that nobody has computed yet, under DistributedDataParallel, which looks at the graph."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import lsq
from lsq.layers.head import Head
from tests.constants import quant_with
from tests.dist.processes import run
from tests.layers.test_logits import HIDDEN, WORDS, Model, loss_of
from tests.sampling import first

IGNORED = -100


class WithLoss(Model):
    """Gives a loss of its own where it gets targets; one layer is never reached."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        logits = super().forward(x)
        return None if target is None else loss_of(logits, target), logits


HOW = {
    "its own": lambda net, x, target: net(x, target)[0],
    "outside": lambda net, x, target: loss_of(net(x)[1], target),
    "of its probabilities": lambda net, x, target: functional.nll_loss(
        net(x)[1].log_softmax(1), target
    ),
}
"""Ways to a loss."""


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(12, HIDDEN, generator=random), torch.randint(WORDS, (12,), generator=random)


def model() -> WithLoss:
    torch.manual_seed(0)
    made = WithLoss()
    lsq.convert(made, quant_with(backward="float", calibration_passes=0), minimum_width=16)
    made(torch.cat([batch(one)[0] for one in range(2)]))[1].sum().backward()  # clips of all batches
    return made


def gradients(made: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in made.named_parameters() if one.grad is not None}


def trained(
    rank: int, how: str, options: dict, ignored: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the second step, and how often logits were computed."""
    x, target = batch(rank)
    made = model()
    net = DistributedDataParallel(made, **options)
    if ignored and rank:
        target = torch.full_like(target, IGNORED)
    with patch.object(Head, "logits", autospec=True, side_effect=Head.logits) as computed:
        for _ in range(2):
            made.zero_grad()
            HOW[how](net, x, target).backward()
    return gradients(made), computed.call_count


def every(rank: int, ignored: bool) -> dict[tuple[str, str], tuple[dict[str, torch.Tensor], int]]:
    every_option = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    return {
        (how, name): trained(rank, how, options, ignored)
        for how in HOW
        for name, options in every_option.items()
    }


@pytest.fixture(scope="module")
def expected() -> list[dict[str, torch.Tensor]]:
    """Gradients of each batch by itself."""
    found = []
    for rank in range(2):
        made = model()
        for _ in range(2):
            made.zero_grad()
            loss_of(made(batch(rank)[0])[1], batch(rank)[1]).backward()
        found.append(gradients(made))
    return found


@pytest.mark.parametrize("ignored", first([True, False], 1))
def test_gradients_are_those_of_all_batches(expected, ignored):
    """`ignored`: the other process has no target, whose gradients are zeros."""
    weights = (1, 0) if ignored else (1, 1)
    mean = {
        name: sum(w * one[name] for w, one in zip(weights, expected, strict=True)) / 2
        for name in expected[0]
    }
    for found in run(every, 2, ignored):
        for (how, options), (one, computed) in found.items():
            torch.testing.assert_close(one, mean, rtol=1e-2, atol=2e-4)
            assert (computed == 0) == (how == "its own"), (how, options)
