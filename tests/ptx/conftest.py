"""Kernels of these tests run in the PTX interpreter."""

import pytest

from tests.ops import cuda
from tests.ptx.interpreter import Interpreter


@pytest.fixture
def interpreted(monkeypatch) -> Interpreter:
    """Let `compare_cuda` run kernels in the interpreter."""
    device = Interpreter()
    monkeypatch.setattr(cuda, "current_device", lambda: device)
    monkeypatch.setattr(cuda, "set_order", lambda order: setattr(device, "order", order))
    return device
