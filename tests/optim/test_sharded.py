"""lsq.optim.Adam on shards of FSDP2."""

import torch
from torch.distributed.fsdp import fully_shard

from lsq.optim import Adam
from tests.dist.processes import run
from tests.dist.test_fsdp import model


def trained(rank: int, ours: bool) -> tuple[list[torch.Tensor], str]:
    """Whole parameters after three steps, and why the norm is refused."""
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    make = Adam if ours else torch.optim.AdamW
    optimizer, refused = make(net.parameters(), lr=0.01, weight_decay=0.1), ""
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 37)).square().sum().backward()
        optimizer.step()
    if ours:
        try:
            optimizer.clip_grad_norm(1.0)
        except ValueError as error:
            refused = str(error)
    return [parameter.full_tensor().detach() for parameter in net.parameters()], refused


def test_steps_are_those_of_torch():
    ours, theirs = run(trained, 2, True), run(trained, 2, False)
    for mine, other in zip(ours[0][0], theirs[0][0], strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)
    assert "clip them by torch.nn.utils.clip_grad_norm_" in ours[0][1]
