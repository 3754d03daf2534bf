"""Runs every test of CUDA kernels in the emulator and, marked `gpu`, on a GPU."""

import pytest

from tests.ops import cuda


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests named ..._on_cuda, and those in files named ..._cuda.py, run kernels."""
    if metafunc.function.__name__.endswith("_on_cuda") or metafunc.module.__name__.endswith("_cuda"):
        metafunc.fixturenames.append("kernels_run_on")
        places = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
        metafunc.parametrize("kernels_run_on", places, indirect=True)


@pytest.fixture
def kernels_run_on(request) -> None:
    """Where the kernels of a test run."""
    before = cuda.place
    cuda.place = request.param
    yield
    cuda.place = before
