"""Prepared passes on CUDA, and in the emulator: one list for a pass, whose inputs and gradients may
move."""

import copy

import pytest
import torch

from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.memory import plan_memory, release_memory
from lsq.native.launch_list import LaunchList
from lsq.run.cuda import CUDA
from lsq.run.executor import profile
from tests.layers.shapes import config_of
from tests.ops import cuda

pytestmark = pytest.mark.skipif(cuda.SANITIZE, reason="compiles the kernels of a layer")


@pytest.fixture(params=[pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def layers(request):
    """(on planned memory, on fresh memory): the same layer, with measured clips."""
    torch.manual_seed(0)
    where = CUDA(cuda.current_device(), activations=request.param)
    fresh = TransformerEncoderLayer(config_of(backward="int8", dropout=0.1, calibration_passes=0))
    fresh = fresh.to(where.device)
    fresh.backend = where
    fresh(torch.randn(3, 2, 48).to(where.device))
    planned = copy.deepcopy(fresh)
    plan_memory(planned, lambda: planned(torch.ones(5, 2, 48, device=where.device)).sum())
    return planned, fresh


def step(layer, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of one pass there and back; none is left on the layer."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    found = [
        y.detach().clone(),
        x.grad.clone(),
        *(parameter.grad.clone() for parameter in layer.parameters()),
    ]
    layer.zero_grad()
    return found


def test_a_pass_that_comes_again_is_one_list_and_gives_the_same_bits(layers, monkeypatch):
    planned, fresh = layers
    runs, run, weights = [], LaunchList.run, 4
    for number in range(4):
        x, upstream = torch.randn(2, 4, 2, 48).to(
            planned.backend.device, planned.backend.activations
        )
        if number == 2:  # parameters, too, lie elsewhere from now on
            for parameter in planned.parameters():
                parameter.data = parameter.data.clone()
        with monkeypatch.context() as patch:
            patch.setattr(LaunchList, "run", lambda self: (runs.append(self), run(self)))
            runs.clear()
            expected = step(fresh, x, upstream)
            assert len(runs) == weights + 2
            runs.clear()
            found = step(planned, x, upstream)
        for name, one, other in zip(
            ["y", "dx", *dict(fresh.named_parameters())], found, expected, strict=True
        ):
            assert torch.equal(one, other), (number, name)
    assert len(runs) == weights + 2 and len(planned.step_memory.prepared) == 2


@pytest.mark.thorough
def test_scratch_memory_may_lie_elsewhere_in_every_run(layers):
    _, layer = layers
    x, upstream = torch.randn(2, 16, 4, 48).to(layer.backend.device, layer.backend.activations)
    others = []
    with profile():
        expected = step(layer, x, upstream)
    for _ in range(3):
        others += [torch.empty(size, device=x.device) for size in range(1 << 12, 1 << 18, 1 << 13)]
        assert all(map(torch.equal, step(layer, x, upstream), expected))


def test_memory_that_is_not_aligned_is_refused_when_a_pass_comes_again():
    layer = QuantizedLinear(48, 32, quant=config_of().quant)
    layer.backend = CUDA(cuda.current_device())
    layer = layer.to(layer.backend.device)
    plan_memory(layer, lambda: layer(torch.ones(8, 48, device=layer.backend.device)).sum())
    memory = torch.randn(8 * 48 + 1).to(layer.backend.device)
    for _ in range(3):
        layer(memory[:-1].view(8, 48)).sum().backward()
    with pytest.raises(ValueError, match="^x: a tensor begins 4 bytes"):
        layer(memory[1:].view(8, 48))
    release_memory(layer)
    with pytest.raises(ValueError, match="x: a tensor begins 4 bytes"):
        layer(memory[1:].view(8, 48))
