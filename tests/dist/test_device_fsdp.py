"""FSDP2 on a device with streams: lsq's layers, its Adam and int8 gradients, as on the CPU in the
emulator."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lsq.dist.fsdp import compress_reduce_scatter
from lsq.layers import TransformerEncoderLayer
from lsq.optim import Adam
from lsq.run.backends import backend
from tests.device.standin import PLACE, ordered
from tests.dist.processes import run
from tests.dist.test_device_groups import device, on_device
from tests.layers.shapes import HIDDEN, config_of

__all__ = ["device"]
STEPS = 2


def train(rank: int, place: torch.device, compressed: bool) -> list[dict[str, torch.Tensor]]:
    """Shards of this process after each step.

    The first one measures clips by largest values, as all devices do.
    """
    torch.manual_seed(1)
    config = config_of(backward="int8", dropout=0.1, clip_init="absmax")
    model = nn.Sequential(TransformerEncoderLayer(config)).to(place)
    model[0].backend = None if place == PLACE else backend("emulated")
    fully_shard(model[0])
    fully_shard(model)
    if compressed:
        compress_reduce_scatter(model)
    optimizer, found = Adam(model.parameters(), lr=0.01, backend=model[0].target), []
    for step in range(STEPS):
        x = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + step))
        torch.manual_seed(10 * rank + step)
        with ordered() if place == PLACE and step else torch.enable_grad():
            model(x.to(place)).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        found.append(
            {name: one.detach().to_local().cpu().clone() for name, one in model.named_parameters()}
        )
    return found


@pytest.mark.parametrize("compressed", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_training_is_the_cpus_and_ordered(compressed):
    found, wanted = (
        on_device(train, 2, PLACE, compressed),
        run(train, 2, torch.device("cpu"), compressed),
    )
    for of_rank, of_cpu in zip(found, wanted, strict=True):
        for step, (here, there) in enumerate(zip(of_rank, of_cpu, strict=True)):
            for name, tensor in there.items():
                bits = {} if compressed else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(
                    here[name], tensor, **bits, msg=lambda text, at=(step, name): f"{at}: {text}"
                )
