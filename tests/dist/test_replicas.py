"""Clips that processes measure on batches of their own are the same in all of them, whatever wraps
the model."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lsq.config import QuantConfig
from lsq.dist.replicas import share
from lsq.layers import QuantizedLinear
from lsq.optim import Adam
from tests.dist.processes import run

WIDTH = 48


class Net(nn.Module):
    """Layers in int8 behind a layer in floats; `branch` belongs to some batches alone."""

    def __init__(self, clips: str = "learned"):
        super().__init__()
        torch.manual_seed(0)
        quant = QuantConfig(clips=clips)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.hidden, self.branch = (QuantizedLinear(WIDTH, WIDTH, quant=quant) for _ in range(2))

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        x = torch.relu(self.embed(x))
        return (self.branch(x) if branch else self.hidden(x)).square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, WIDTH, generator=generator) * (1 + rank)


def clips(net: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: clip for name, clip in net.named_parameters() if name.endswith("clip")}
    return {
        name: (c.full_tensor() if hasattr(c, "full_tensor") else c).detach().clone()
        for name, c in found.items()
    }


def train(
    model: nn.Module, optimizer, rank: int, steps: int, branch=lambda step: False, passes: int = 1
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            model(batch(rank, 10 * step + number), branch(step)).backward()
        optimizer.step()


def measured(rank: int, branch: bool = False, kind: str = "learned") -> dict[str, torch.Tensor]:
    """What one process alone measures on its first batch."""
    net = Net(kind)
    net(batch(rank, 0), branch)
    return clips(net)


def same(results: list[dict[str, torch.Tensor]]) -> None:
    for name, clip in results[0].items():
        assert all(torch.equal(clip, other[name]) for other in results[1:]), name


def under_ddp(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    trainings = {"one": (1, 0.0, 1), "many": (20, 1e-3, 1), "accumulated": (9, 1e-3, 3)}
    for name, (steps, rate, passes) in trainings.items():
        net = Net()
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.0)
        train(model, optimizer, rank, steps, passes=passes)
        found[name] = clips(net)
    return found


def test_data_parallel_training_averages_what_was_measured():
    results = run(under_ddp, 2)
    for name in results[0]:
        same([of_rank[name] for of_rank in results])
    alone = [measured(rank)["hidden.input_clip"] for rank in range(2)]
    assert alone[1] > 1.5 * alone[0]
    torch.testing.assert_close(results[0]["one"]["hidden.input_clip"], (alone[0] + alone[1]) / 2)


def following(rank: int) -> dict[str, torch.Tensor]:
    net = Net(clips="absmax")
    model = DistributedDataParallel(net, find_unused_parameters=True)
    train(
        model, Adam(net.parameters(), lr=1e-2), rank, 12, lambda step: rank == 1 and step % 3 == 1
    )
    found = clips(net)
    del found["branch.weight_clip"]  # of weights that one process does not round
    return found


def test_clips_that_follow_are_the_largest_of_all_processes():
    """Also those of a branch that one process alone runs."""
    results = run(following, 2)
    same(results)
    seen = measured(1, kind="absmax")["hidden.input_clip"]
    assert 0.8 * seen < results[0]["hidden.input_clip"] < 2 * seen
    assert results[0]["branch.input_clip"] < 8  # not where it began


def with_branches(rank: int) -> list[dict[str, torch.Tensor]]:
    """The branch is run by process 0 alone, by process 1 alone, by both in different steps;
    optimizers of two kinds."""
    found = []
    for number, branch in enumerate(
        (lambda step: rank == 0, lambda step: rank == 1, lambda step: step % 3 == rank)
    ):
        net = Net()
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = Adam if number % 2 else torch.optim.SGD
        train(model, optimizer(net.parameters(), lr=1e-3), rank, 9, branch)
        found.append(clips(net))
    return found


def test_branches_that_some_processes_run_neither_hang_nor_part():
    results = run(with_branches, 2)
    for number in range(3):
        same([of_rank[number] for of_rank in results])
    only = measured(1, branch=True)["branch.input_clip"]
    # not mixed with no measure
    torch.testing.assert_close(results[0][1]["branch.input_clip"], only, rtol=0.2, atol=0)


def joining(rank: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lsq.dist.replicas").addHandler(handler)
    net = Net()
    share(net)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with model.join():
        train(model, optimizer, rank, 3 + 2 * rank)
    return clips(net), records


def test_uneven_batches_under_join_end_with_the_same_clips():
    results = run(joining, 2)
    same([found for found, _ in results])
    for _, records in results:
        assert len(records) == 1 and records[0].startswith(
            "under DistributedDataParallel.join() the clips"
        )


def under_fsdp(rank: int, shape: tuple[int, ...], branch: bool) -> dict[str, torch.Tensor]:
    """Whole clips after steps that change nothing; the branch is run by the last process alone."""
    net = Net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    if not branch:
        for layer in (net.hidden, net.embed):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    train(net, optimizer, rank, 1, lambda step: branch and rank == distributed.get_world_size() - 1)
    return clips(net)


@pytest.mark.parametrize(("shape", "branch"), [((2,), False), ((2,), True), ((2, 2), False)])
def test_shards_hold_the_mean_of_all_processes(shape, branch):
    workers = torch.Size(shape).numel()
    results = run(under_fsdp, workers, shape, branch)
    same(results)
    if branch:
        wanted = [
            measured(0)["hidden.input_clip"],
            measured(workers - 1, branch=True)["branch.input_clip"],
        ]
        found = [results[0]["hidden.input_clip"], results[0]["branch.input_clip"]]
    else:
        alone = [measured(rank)["hidden.input_clip"] for rank in range(workers)]
        wanted, found = [torch.stack(alone).mean(0)], [results[0]["hidden.input_clip"]]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def by_hand(rank: int) -> dict[str, torch.Tensor]:
    net = Net()
    handle = share(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        net(batch(rank, step)).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
        optimizer.step()
    found = clips(net)
    handle.remove()
    train(net, optimizer, rank, 1 + rank)
    return found


def test_gradients_that_are_made_equal_by_hand():
    """And after `remove` nobody waits for anybody."""
    same(run(by_hand, 2))


def with_copies(rank: int) -> dict[str, torch.Tensor]:
    """The optimizer holds copies of the parameters, as DeepSpeed's ZeRO has it."""
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    net = Net(clips="absmax")
    share(net)
    copies = [nn.Parameter(one.detach().clone()) for one in net.parameters()]
    optimizer = torch.optim.SGD(copies, lr=1e-2)
    for step in range(3):
        net(batch(rank, step)).backward()
        optimizer.step()
    found = clips(net)
    del found["branch.weight_clip"], found["branch.input_clip"]
    return found


def test_an_optimizer_of_copies_counts_for_a_model_that_is_shared():
    same(run(with_copies, 2))


def apart(rank: int) -> dict[str, torch.Tensor]:
    net = Net()
    train(net, torch.optim.SGD(net.parameters(), lr=1e-2), rank, 2 + 3 * rank)
    return clips(net)


def test_trainings_of_their_own_exchange_nothing():
    first, second = run(apart, 2)
    assert not torch.equal(first["hidden.input_clip"], second["hidden.input_clip"])
