"""What a pass costs beside its arithmetic: calls of Python functions, lines to read, modules
loaded."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import lsq
from lsq.layers import ProgramModule

CALLS = 400
"""Of Python functions, those of PyTorch included, in a warm training pass of two layers."""
MODULES = 85
"""Of lsq, that a first training step loads."""
LINES = 25
"""Of ProgramModule.execute."""


def converted() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    lsq.convert(model)
    return model


def test_a_warm_pass_makes_few_calls():
    model, x, calls = converted(), torch.randn(32, 64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):  # past the passes that measure
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    model(x)
    sys.setprofile(None)
    assert len(calls) <= CALLS


@pytest.mark.thorough
def test_a_first_step_loads_few_modules():
    code = (
        "import sys, torch, lsq; from torch import nn;model = nn.Sequential(nn.Linear(64, 64),"
        " nn.ReLU(), nn.Linear(64, 64));lsq.convert(model); optimizer ="
        " torch.optim.SGD(model.parameters(), lr=0.01);model(torch.randn(8, 64)).sum().backward();"
        " optimizer.step();print(sum(name.partition('.')[0] == 'lsq' for name in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) <= MODULES


def test_a_pass_can_be_read_aloud():
    assert len(inspect.getsource(ProgramModule.execute).splitlines()) <= LINES
