"""Sparse models with all that surrounds them: planned memory, several processes."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.models.sparsity import Pruning, sparsify
from tests.dist.processes import run
from tests.layers.shapes import HIDDEN, config_of
from tests.layers.toy import largest, losses, twins


def planned_and_naive(updates: int, *, every: int, guarded: bool, **options) -> int:
    """Faults that a guard found in trainings of so many updates, whose losses are the same."""
    planned, naive = twins(**options)
    for model in (planned, naive):
        sparsify(model, Pruning(every=every))
    memory = plan_memory(planned, largest(planned), **({"mode": "guard"} if guarded else {}))
    assert losses(planned, updates, accumulate=2) == losses(naive, updates, accumulate=2)
    return memory.fired if guarded else 0


def test_planned_memory_changes_no_number():
    planned_and_naive(2, every=1, guarded=False, backward="int8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float"}, {"mode": "float"}]
)
@pytest.mark.parametrize("every", [0, 1])
def test_guarded_memory_finds_no_fault(options, every):
    assert planned_and_naive(3, every=every, guarded=True, **options) == 0


def trained(rank: int, parallel: bool) -> dict[str, torch.Tensor]:
    """The state after three steps; of two processes, each has a half of the batch."""
    torch.manual_seed(1)
    layer = TransformerEncoderLayer(config_of(calibration_passes=0))
    layer(torch.randn(7, 4, HIDDEN))
    sparsity = sparsify(layer, Pruning(every=1, decay=0.01))
    model = DistributedDataParallel(layer) if parallel else layer
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.dim() == 2], lr=5.0)
    sparsity.follow(optimizer)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(7, 4, HIDDEN)
        x = x[:, rank::2] if parallel else x
        (model(x) - x.roll(1, dims=2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sparsity.changed > 0
    return {name: one.detach() for name, one in layer.state_dict().items()}


@pytest.mark.thorough
def test_distributed_data_parallel():
    expected = trained(0, False)
    for found in run(trained, 2, True):
        for name, one in expected.items():
            torch.testing.assert_close(
                found[name], one, rtol=1e-3, atol=1e-3, msg=lambda why, at=name: f"{at}: {why}"
            )


def sharded(rank: int) -> list[str]:
    messages = []
    for late in (True, False):
        layer = TransformerEncoderLayer(config_of())
        if late:
            fully_shard(layer)
        with pytest.raises(ValueError) as refused:
            sparsity = sparsify(layer)
            fully_shard(layer)
            sparsity.choose()
        messages.append(str(refused.value))
    return messages


@pytest.mark.thorough
def test_shards_are_refused():
    (messages,) = run(sharded, 1)
    for message in messages:
        assert (
            "is a shard of FSDP2, which masks do not know; train sparse weights with Distributed"
            in message
        )
