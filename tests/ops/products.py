"""How the CPU multiplies, for tests."""

from contextlib import contextmanager

import pytest
import torch

from lsq.native import tiles
from tests.ops.compare import on_cpu
from tests.ops.cuda import same_bits


@contextmanager
def multiplied(kernel: str, rows: int = 0):
    """Within it, all products of the CPU run so; the test is skipped where the kernel cannot."""
    if kernel not in tiles.usable():
        pytest.skip(f"this processor has no {kernel}")
    made = tiles.TileProduct.of

    def in_strips(*operands):
        product = made(*operands)
        product.strip = rows
        return product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "fastest", lambda: kernel)
        patch.setattr(tiles.TileProduct, "of", in_strips)
        yield


WAYS = [(kernel, rows) for kernel in tiles.INSTRUCTIONS for rows in (0, 32, 64)]
"""Kernels, and rows at a time."""


def assert_same_bits(operation, way: tuple[str, int], threads: int = 2) -> None:
    """An operation writes the same bits as with the plain kernel and all rows at once."""
    with multiplied(tiles.PLAIN, 4096):
        whole = on_cpu(operation)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with multiplied(*way):
            found = on_cpu(operation)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found.outputs, whole.outputs, strict=True):
        assert one is None or same_bits(one, other)
