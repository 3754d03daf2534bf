"""What tests with the PTX interpreter share: NVRTC, and the modules of benchmarks/."""

import sys
from pathlib import Path

import pytest

from tests.ops import cuda
from tests.ptx.interpreter import Interpreter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def interpreted(request, monkeypatch) -> Interpreter:
    """Let `compare_cuda` run kernels in the interpreter; a parameter is their target."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC makes the PTX")
    device = Interpreter(getattr(request, "param", "compute_80"))
    monkeypatch.setattr(cuda, "current_device", lambda: device)
    monkeypatch.setattr(cuda, "set_order", lambda order: setattr(device, "order", order))
    return device
