"""lsq.optim.Adam on shards of FSDP2."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from lsq.optim import Adam
from tests.dist.processes import run
from tests.dist.test_fsdp import model

LARGEST = 8.0
"""Norm above which gradients are clipped."""


def trained(rank: int, ours: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Whole parameters after three steps, and the norms of the gradients, which are clipped."""
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    make = Adam if ours else torch.optim.AdamW
    optimizer, norms = make(net.parameters(), lr=0.01, weight_decay=0.1), []
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 37)).square().sum().backward()
        norm = (
            optimizer.clip_grad_norm(LARGEST)
            if ours
            else clip_grad_norm_(net.parameters(), LARGEST)
        )
        norms.append((norm if ours else norm.full_tensor()).item())
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in net.parameters()], norms


@pytest.mark.thorough
def test_steps_are_those_of_torch():
    ours, theirs = run(trained, 2, True), run(trained, 2, False)
    for mine, other in zip(ours[0][0], theirs[0][0], strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)
    (_, norms), (_, others) = ours
    assert norms == others and norms == pytest.approx(theirs[0][1]) and max(norms) > LARGEST


def other_moments(rank: int) -> None:
    """Moments of 32 bits become those of 8 bits and come back, as shards of unequal rows."""
    net = fully_shard(model())
    optimizer, coded = (Adam(net.parameters(), moment_bits=bits) for bits in (32, 8))
    with pytest.raises(ValueError, match="a shard of FSDP2; offload moves"):
        coded.offload(".")
    net(torch.randn(5, 37)).square().sum().backward()
    optimizer.step()
    coded.load_state_dict(optimizer.state_dict())
    again = Adam(net.parameters())
    again.load_state_dict(coded.state_dict())
    for parameter in net.parameters():
        wanted, found = optimizer.state[parameter], again.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            values, near = wanted[name].full_tensor(), found[name].full_tensor()
            assert (near - values).abs().max() <= 0.02 * values.abs().max()
        if parameter.dim() > 1:
            kept = coded.state[parameter]["exp_avg_scale"]
            assert kept.shape == (len(parameter), 1) and len(kept.to_local()) < len(parameter)


@pytest.mark.thorough
def test_moments_of_shards_change_their_bits():
    run(other_moments, 2)
