"""Layers whose parameters FSDP2 shards: clips are those of a layer in one piece."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from lsq.layers import TransformerEncoderLayer
from lsq.optim import Adam
from tests.dist.processes import run
from tests.layers.shapes import HIDDEN, config_of

STEPS, PASSES = 3, 2
OPTIMIZERS = {"lsq": Adam, "torch": torch.optim.AdamW}


def states(layer: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """The whole parameters before and after every step, which is far longer than clip_step."""

    def state():
        found = {name: one for name, one in layer.state_dict().items() if one.is_floating_point()}
        return {
            name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
            for name, one in found.items()
        }

    found = [state()]
    for step in range(STEPS):
        for number in range(PASSES):
            torch.manual_seed(10 * step + number)
            layer(torch.randn(7, 3, HIDDEN)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(state())
    return found


def encoder() -> nn.Module:
    torch.manual_seed(1)
    return TransformerEncoderLayer(
        config_of(backward="float", clip_step=0.01, calibration_passes=2)
    )


def sharded(rank: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    found = {}
    for name, make in OPTIMIZERS.items():
        layer = fully_shard(encoder()).train()
        found[name] = states(layer, make(layer.parameters(), lr=0.1))
    return found


@pytest.mark.thorough
def test_clips_are_measured_and_limited_as_in_one_piece():
    """Under lsq's Adam and another one; by passes of which two belong to a step."""
    both = run(sharded, 2)
    for name, make in OPTIMIZERS.items():
        layer = encoder()
        wanted = states(layer, make(layer.parameters(), lr=0.1))
        for of_rank in both:
            for step, (found, expected) in enumerate(zip(of_rank[name], wanted, strict=True)):
                for path, tensor in expected.items():
                    torch.testing.assert_close(
                        found[path],
                        tensor,
                        rtol=1e-4,
                        atol=1e-4,
                        msg=lambda text, at=(name, step, path): f"{at}: {text}",
                    )


def part_alone(rank: int) -> str:
    layer = encoder()
    fully_shard(layer.feed_forward)  # which is never called
    with pytest.raises(ValueError) as refused:
        layer(torch.randn(7, 3, HIDDEN))
    distributed.barrier()
    return str(refused.value)


def test_shards_are_refused():
    (message,) = run(part_alone, 1)
    assert message.startswith("parameters of this TransformerEncoderLayer are shards of FSDP2")
