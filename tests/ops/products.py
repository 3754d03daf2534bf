"""How the CPU multiplies, for tests."""

from contextlib import contextmanager

import pytest
import torch

from lsq import gemm
from lsq.gemm.configuration import ONEDNN, CpuConfiguration
from lsq.native import tiles
from tests.ops.compare import on_cpu
from tests.ops.cuda import same_bits


@contextmanager
def multiplied(kernel: str = ONEDNN, rows: int = 512):
    """Within it, all products of the CPU run so, where nothing is tuned."""
    before = CpuConfiguration.default
    CpuConfiguration.default = classmethod(lambda cls, key: cls(kernel=kernel, rows=rows))
    gemm.set_files([])
    try:
        yield
    finally:
        CpuConfiguration.default = before
        gemm.set_files(None)


WAYS = [
    (ONEDNN, 32),
    (ONEDNN, 100),
    *((kernel, rows) for kernel in tiles.INSTRUCTIONS for rows in (0, 32, 64)),
]
"""Kernels, and rows at a time."""


def assert_same_bits(operation, way: tuple[str, int], threads: int = 2) -> None:
    """An operation writes what it writes with all rows of its product at once, bit by bit."""
    kernel, rows = way
    if kernel != ONEDNN and kernel not in tiles.usable():
        pytest.skip(f"this processor has no {kernel}")
    with multiplied(rows=0):
        whole = on_cpu(operation)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with multiplied(kernel, rows):
            found = on_cpu(operation)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found.outputs, whole.outputs, strict=True):
        assert one is None or same_bits(one, other)
