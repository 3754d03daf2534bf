"""Planned memory on the test device: an arena there, and each pass that comes again is one list."""

import copy

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.native.launch_list import LaunchList
from tests.device.standin import PLACE
from tests.layers.shapes import HIDDEN, config_of


def step(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients on the CPU."""
    torch.manual_seed(1)
    layer.zero_grad()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach().cpu(), *(parameter.grad.cpu() for parameter in layer.parameters())]


@pytest.mark.thorough
def test_a_layer_on_planned_memory_gives_the_same_bits():
    fresh = TransformerEncoderLayer(
        config_of(backward="int8", dropout=0.1, calibration_passes=0)
    ).to(PLACE)
    fresh(torch.randn(3, 2, HIDDEN).to(PLACE))  # measures the clips
    planned = copy.deepcopy(fresh)
    memory = plan_memory(planned, lambda: planned(torch.ones(5, 2, HIDDEN).to(PLACE)).sum())
    assert memory.arena.device == PLACE
    runs, run = [], LaunchList.run
    # not the fixture, which undoes it in another process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchList, "run", lambda self: (runs.append(self), run(self)))
        for _ in range(3):
            x = torch.randn(4, 2, HIDDEN).to(PLACE)
            wanted = step(fresh, x)
            runs.clear()
            found = step(planned, x)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    weights = 4
    assert len(memory.prepared) == 2 and len(runs) == weights + 2
