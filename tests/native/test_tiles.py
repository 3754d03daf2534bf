"""Tiles multiply exactly, in every library that this processor can run, with every kind of
instructions."""

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from lsq import gemm
from lsq.native import loader, processor, tiles
from lsq.native.tiles import INSTRUCTIONS, TileProduct

FOLDER = Path(loader.__file__).parent
LEVELS = ("v1", "v3", "v4")
SIZES = [
    (1, 8, 16),
    (5, 70, 3),
    (33, 33, 65),
    (64, 32, 1088),
    (130, 96, 64),
    (40, 300, 200),
    (64, 32, 4224),
    (33, 40, 4161),
]
TRANSPOSED = [(False, False), (False, True), (True, True)]


@pytest.fixture(params=LEVELS)
def library(request):
    path = FOLDER / f"libcpu_{request.param}.so"
    needed = loader._REQUIRED[request.param]
    if not path.exists() or not needed <= processor.cpu_features():
        pytest.skip(f"no library of level {request.param} runs here")
    return ctypes.CDLL(str(path))


def codes(rows, columns, transposed):
    if transposed:
        return torch.randint(-127, 128, (columns, rows), dtype=torch.int8).t()
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8)


def aligned(size):
    memory = torch.full((size + 64,), 85, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :][:size]


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_sums_are_exact(library, instructions, monkeypatch):
    library.lsq_tiles_usable.restype = ctypes.c_int64
    if not library.lsq_tiles_usable(ctypes.c_int64(INSTRUCTIONS[instructions])):
        pytest.skip(f"no {instructions} there")
    monkeypatch.setattr(tiles, "usable", lambda: (instructions,))
    for (rows, columns, inner), (a_lies, b_lies) in itertools.product(SIZES, TRANSPOSED):
        a, b = codes(rows, inner, a_lies), codes(columns, inner, b_lies)
        memory = aligned(tiles.packed_bytes(columns, inner))
        product = TileProduct.of(a, b, instructions, memory)
        out = torch.full((rows, columns), 7, dtype=torch.int32)
        library.lsq_pack_columns(product.packed)
        for first in range(0, rows, 32):
            count = min(32, rows - first)
            place = ctypes.c_void_p(out[first:].data_ptr())
            library.lsq_multiply_block(
                product.packed, ctypes.c_int64(first), ctypes.c_int64(count), place
            )
        assert torch.equal(out, gemm.reference(a, b)), (rows, columns, inner, a_lies, b_lies)


def test_the_largest_codes_do_not_overflow():
    a, b = (
        torch.full((32, 1024), 127, dtype=torch.int8),
        torch.full((32, 1024), -127, dtype=torch.int8),
    )
    for instructions in tiles.usable():
        memory = aligned(tiles.packed_bytes(32, 1024))
        product = TileProduct.of(a, b, instructions, memory)
        out = torch.empty(32, 32, dtype=torch.int32)
        loader.call("lsq_pack_columns", product)
        loader.call("lsq_multiply_block", product, 0, 32, out)
        assert (out == -1024 * 127 * 127).all() and memory.numel()


def test_plain_is_always_there_and_the_last():
    assert not loader.available() or tiles.usable()[-1] == tiles.PLAIN
