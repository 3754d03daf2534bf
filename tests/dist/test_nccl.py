"""Exchanges on a GPU over NCCL with one worker: kernels, stream order and futures; several GPUs
were never at hand."""

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientConfig, hooks
from lsq.dist.collectives import Scratch
from lsq.dist.gcq import GCQ
from lsq.dist.two_hop import TwoHop
from tests.dist import oracle
from tests.dist.processes import run

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SIZES = (1, 1000, 20011)


def averages(rank: int) -> list[torch.Tensor]:
    world, scratch = distributed.group.WORLD, Scratch(GPU)
    ways = (TwoHop(world, scratch), TwoHop(world, scratch, world), GCQ(world, scratch))
    results = []
    for size in SIZES:
        for way in ways:
            buffer = gradient(size).to(GPU)
            way.average(buffer)
            results.append(buffer.cpu())
    return results


def gradient(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def test_one_worker_gets_its_own_rounded_gradient():
    (found,) = run(averages, 1, backend="nccl")
    for number, buffer in enumerate(found):
        row = gradient(SIZES[number // 3]).numpy()
        wanted = oracle.gcq([row]) if number % 3 == 2 else oracle.two_hop([row], 1.0)
        assert torch.equal(buffer, torch.from_numpy(wanted)), number


def steps(rank: int, mode: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(gradient through the hook, exact one) of steps of DDP with many buckets."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU()))
    ).to(GPU)
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    topology = hooks.Topology(world_size=1, rank=0, node_size=1)
    compression = hooks.GradientCompression(mode, topology, model.process_group)
    model.register_comm_hook(compression, hooks.GradientCompression.exchange)
    compression._prepare(GradientConfig(mode=mode), GPU)
    results = []
    for _ in range(5):
        x = torch.randn(64, 512, device=GPU)
        net.zero_grad()
        model(x).square().sum().backward()
        found = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
        exact = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        results.append((found.cpu(), torch.cat([part.flatten() for part in exact]).cpu()))
    return results


@pytest.mark.parametrize("mode", ["int8", "gcq"])
def test_ddp_waits_for_the_side_stream(mode):
    for found, exact in run(steps, 1, mode, backend="nccl")[0]:
        assert (found - exact).norm() < 0.3 * exact.norm()
