"""PyTorch's default device and dtype, on which nothing may depend."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def other_defaults() -> Iterator[None]:
    """Make tensors by default of another device and dtype than any that tests use."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
