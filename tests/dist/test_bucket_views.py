"""Gradients of lsq's layers are written into DDP's buckets: nothing is copied there, and bits stay
the same."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from lsq.dist import compress_gradients
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.optim import Adam
from tests.dist.net import config
from tests.dist.processes import run
from tests.layers.shapes import HIDDEN, config_of
from tests.sampling import first

STEPS = 4
"""DDP puts parameters into other buckets before the second step, so gradients lie there from the
third on."""
COPY = "torch::distributed::reducer::copy_"


class Net(nn.Module):
    """A layer twice the same weight apart from others, one that PyTorch computes, and one that is
    used at times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        quantized = config_of(backward="int8", dropout=0.1)
        self.encoder, self.plain = TransformerEncoderLayer(quantized), nn.Linear(HIDDEN, HIDDEN)
        self.twice, self.spare = (
            QuantizedLinear(HIDDEN, HIDDEN, quant=quantized.quant) for _ in range(2)
        )

    def forward(self, x, spare=False):
        x = self.plain(self.twice(self.twice(self.encoder(x))))
        return (self.spare(x) if spare else x).square().mean()


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + number))


def train(
    rank: int, mode: str, views: bool, planned: bool
) -> list[tuple[dict[str, torch.Tensor], int]]:
    """(gradients after a step, how many were copied), with two backward passes in the last step,
    the first alone."""
    net = Net()
    model = DistributedDataParallel(
        net, gradient_as_bucket_view=views, find_unused_parameters=True, bucket_cap_mb=0.05
    )
    compress_gradients(model, config(mode))
    optimizer, found = Adam(net.parameters(), lr=0.01), []
    if planned:
        plan_memory(net, lambda: net(batch(rank, 0), True))
    torch.manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        with profile() as record:
            if step == STEPS - 1:
                with model.no_sync():
                    model(batch(rank, 50), spare=True).backward()
            model(batch(rank, step), spare=rank == 0 and step > 0).backward()
        copies = sum(event.name == COPY for event in record.events())
        found.append(
            (
                {
                    name: one.grad.clone()
                    for name, one in net.named_parameters()
                    if one.grad is not None
                },
                copies,
            )
        )
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "mode, planned", first([("int8", True), ("bf16", False), ("int8", False), ("bf16", True)], 1)
)
def test_gradients_are_the_same_and_not_copied(mode, planned):
    with_views, without = run(train, 2, mode, True, planned), run(train, 2, mode, False, planned)
    for of_rank, others in zip(with_views, without, strict=True):
        for step, ((found, copies), (wanted, all_copies)) in enumerate(
            zip(of_rank, others, strict=True)
        ):
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), (step, name)
            if step > 1:
                # of PyTorch's layer; of the layer that runs twice, whose gradients are summed
                foreign = 2 + 4
                assert copies <= foreign and all_copies >= 27, (step, copies, all_copies)


def grads(rank: int) -> None:
    """torch.autograd.grad keeps what it returns, whatever comes later."""
    net = Net()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, find_unused_parameters=True)
    compress_gradients(model, config("bf16"))
    for step in range(3):
        net.zero_grad()
        model(batch(rank, step), True).backward()
    net.zero_grad()
    found = torch.autograd.grad(net(batch(rank, 3), True), list(net.parameters()))
    before = [one.clone() for one in found]
    model(batch(rank, 4), True).backward()
    assert all(map(torch.equal, found, before))


def test_gradients_that_are_asked_for_are_their_callers():
    run(grads, 2)
