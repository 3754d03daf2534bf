"""Where operations of a test run: on the CPU, and by kernels in the emulator and on a GPU."""

import pytest
import torch

from lsq import gemm
from tests.ops import cuda
from tests.ops.compare import compare, on_cpu


@pytest.fixture(params=["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, monkeypatch) -> str:
    if request.param != "cpu":
        monkeypatch.setattr(cuda, "place", request.param)
    return request.param


@pytest.fixture
def compared(where):
    """Compare an operation with its reference there; see `compare` and `compare_cuda`."""
    if where == "cpu":
        return lambda operation, dtype=torch.float32, exact=False: compare(operation)
    return cuda.compare_cuda


@pytest.fixture
def runs(where):
    """Run an operation there, in every order of threads: what each made."""
    if where == "cpu":
        return lambda operation: [on_cpu(operation)]
    return lambda operation: [cuda.run(operation, order=order) for order in cuda.ORDERS]


@pytest.fixture
def products_by_themselves():
    """Kernels after a product alone; those that end it as well: test_product_kernels_cuda.py."""
    with gemm.ended_by(None):
        yield
