"""Fused layers in several processes: DistributedDataParallel, and FSDP2 with a checkpoint of its
shards."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.constants import quant_with
from tests.dist.processes import run
from tests.models.architectures.test_llama import MAKERS
from tests.models.checks import fused, made, right_padded
from tests.models.test_workers import alike, assert_shards_go_on, saved_and_loaded, whole

QUANT = quant_with(backward="float", clip_step=0.01, calibration_passes=2)
BATCH = right_padded((9, 9, 9))


def model(seed: int = 1) -> nn.Module:
    return fused(made(MAKERS["qwen3"], seed), QUANT)


def trained(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(rank: int) -> dict[str, torch.Tensor]:
    one = model()
    trained(DistributedDataParallel(one))
    return whole(one)


@pytest.mark.thorough
def test_distributed_data_parallel():
    expected = model()
    trained(expected)
    for found in run(parallel, 2):
        alike(found, whole(expected))


def shard(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def sharded(rank: int, folder: str) -> list[dict[str, torch.Tensor]]:
    return saved_and_loaded(shard(model()), shard(model(5)), trained, folder)


@pytest.mark.thorough
def test_fully_shard_and_a_checkpoint_of_its_shards():
    assert_shards_go_on(sharded, model(), trained)
