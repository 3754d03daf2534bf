"""Where operations of a test run: on the CPU, and by kernels in the emulator and on a GPU."""

import pytest
import torch

from tests.ops import cuda
from tests.ops.compare import compare, on_cpu
from tests.ops.tiles import WAYS, compare_ways


@pytest.fixture(params=["cpu", "emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, monkeypatch) -> str:
    if request.param != "cpu":
        monkeypatch.setattr(cuda, "place", request.param)
    return request.param


@pytest.fixture
def compared(where):
    """Compare with the reference: `compare`, `compare_cuda`, for products `compare_ways`."""
    if where == "cpu":
        return lambda operation, dtype=torch.float32, exact=False: compare(operation)
    return lambda operation, *options, **more: (
        compare_ways if operation.name in WAYS else cuda.compare_cuda
    )(operation, *options, **more)


@pytest.fixture
def same_codes(where, compared):
    """`compared`, and integers must be those of the reference on the CPU, of the CPU on CUDA."""
    if where == "cpu":
        return lambda operation, dtype=torch.float32: compare(operation, exact=True)
    return lambda operation, dtype=torch.float32: compared(operation, dtype, exact=True)


@pytest.fixture
def runs(where):
    """Run an operation there, in every order of threads: what each made."""
    if where == "cpu":
        return lambda operation: [on_cpu(operation)]
    return lambda operation: [cuda.run(operation, order=order) for order in cuda.ORDERS]
