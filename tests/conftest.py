"""What every test shares: few threads, fixed seeds, and a plain word where a GPU is missing."""

import random
import signal

import numpy
import pytest
import torch

# A shell's background job ignores SIGINT and passes that on; tests of interruption need it as at a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random numbers."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
