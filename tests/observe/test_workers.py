"""Several processes: all decide the same, whoever has seen it."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lsq
from lsq.observe import Bounds
from tests.dist.processes import run
from tests.observe.models import converted, train
from tests.observe.test_monitor import ALL_BELOW

UP = "blocks.0.up"


def parallel(rank: int) -> dict:
    model = converted()
    monitor = lsq.monitor(DistributedDataParallel(model), every=2, patience=1)
    if rank == 1:  # it alone sees too much noise
        see = monitor._see

        def noisy(module, program, tensors, outputs):
            rows = {"x": 1e4 * tensors["x"]} if monitor._watched[module] == UP else {}
            see(module, program, {**tensors, **rows}, outputs)

        monitor._see = noisy
    losses = train(DistributedDataParallel(model), monitor, 6, rank=rank)
    return {
        "fallen": monitor.in_floats,
        "readings": {k: one.values() for k, one in monitor.readings.items()},
        "weight": model.get_submodule(UP).weight.detach(),
        "losses": losses,
    }


@pytest.mark.thorough
def test_all_processes_decide_the_same():
    first, second = run(parallel, 2)
    assert first["fallen"] == second["fallen"] == (UP,)
    assert first["readings"] == second["readings"] and len(first["readings"]) == 6
    assert torch.equal(first["weight"], second["weight"])
    assert first["losses"][-1] < first["losses"][0]


def sharded(rank: int) -> dict:
    model = converted()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    monitor = lsq.monitor(model, every=1, patience=3, bounds=ALL_BELOW)
    train(model, monitor, 2, rank=rank)
    readings = {name: one.values() for name, one in monitor.readings.items()}
    train(model, monitor, 1, rank=rank)
    fallen = monitor.in_floats
    losses = train(model, monitor, 3, rank=rank)
    distributed.barrier()
    return {"readings": readings, "fallen": fallen, "losses": losses}


def alone(rank: int) -> dict:
    model = converted()
    monitor = lsq.monitor(model, every=1, bounds=Bounds(), fall_back=False)
    train(model, monitor, 2)
    return {name: one.values() for name, one in monitor.readings.items()}


@pytest.mark.thorough
def test_shards():
    first, second = run(sharded, 2)
    assert first["readings"] == second["readings"] and len(first["readings"]) == 7
    for name, values in alone(0).items():  # of one of the two batches, beside the least of both
        for kind, value in values.items():
            # as far as two batches differ
            assert abs(first["readings"][name][kind] - value) < 15, (name, kind)
    assert len(first["fallen"]) == len(second["fallen"]) == 7
    assert first["losses"][-1] < first["losses"][0]
