"""Fused layers in several processes: DistributedDataParallel, and FSDP2 with a checkpoint of its shards."""

import tempfile
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lsq.config import QuantConfig
from tests.architectures.checks import fused, made, right_padded
from tests.architectures.test_llama import MAKERS
from tests.conversion.test_workers import alike, whole
from tests.dist.processes import run

QUANT = QuantConfig(backward="float", clip_step=0.01, calibration_passes=2)
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
    first, other = shard(model()), shard(model(5))
    trained(first)
    checkpoint.save(get_model_state_dict(first), checkpoint_id=folder)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    found = [whole(first), whole(other)]
    for one in (first, other):
        trained(one, 1)
        found.append(whole(one))
    distributed.barrier()
    return found


def test_fully_shard_and_a_checkpoint_of_its_shards():
    expected = model()
    trained(expected)
    before = whole(expected)
    trained(expected, 1)
    with tempfile.TemporaryDirectory() as folder:
        for first, loaded, after, after_loaded in run(sharded, 2, str(Path(folder) / "checkpoint")):
            alike(first, before)
            alike(loaded, first)
            alike(after, whole(expected))
            alike(after_loaded, after)
