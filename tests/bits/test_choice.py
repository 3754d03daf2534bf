"""The way that is planned, and why; times are those of benchmarks/bench_bits.py."""

from unittest import mock

import pytest
import torch

from lsq.bits import planned, to_bits
from lsq.bits.choice import on_cpu, on_gpu
from lsq.native import loader, tiles


def chosen(rows: int, instructions: str, popcounts: bool = True) -> set[tuple[int, int]]:
    """(bits of the right operand, of the left one) whose products are made by planes."""
    pairs = ((w, a) for w in (1, 2, 3, 4, 8) for a in (1, 2, 3, 4, 8))
    return {
        pair
        for pair in pairs
        if on_cpu(*pair, rows, 2048, 1.0, instructions, popcounts).way == "planes"
    }


ONE = {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (8, 1)}
EIGHT = {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 1)}


@pytest.mark.skipif(not loader.available(), reason="bytes need the C++ library")
def test_pairs_that_planes_multiply():
    assert chosen(1, "amx") == ONE
    for instructions in ("avx512_vnni", tiles.PLAIN):
        assert chosen(1, instructions) == ONE | {(3, 3)}
    assert chosen(8, "avx512_vnni") == EIGHT
    assert chosen(64, "avx512_vnni") == EIGHT - {(1, 4)}
    assert chosen(8, "amx") == EIGHT - {(1, 4)}
    assert chosen(16, "amx") == {(1, 1)}
    assert chosen(64, "amx") == set()
    assert chosen(64, "avx_vnni", popcounts=False) == {(1, 1)}
    assert chosen(64, tiles.PLAIN, popcounts=False) == EIGHT - {(1, 4)}


@pytest.mark.skipif(not loader.available(), reason="bytes need the C++ library")
def test_tiles_of_zeros_count():
    assert on_cpu(4, 1, 1000, 2048, 0.3, "amx").way == "bytes"
    assert on_cpu(4, 1, 1000, 2048, 0.15, "amx").way == "planes"
    assert on_cpu(4, 1, 1000, 16, 0.3, "amx").way == "planes"  # unpacking takes longer
    sparse = torch.eye(1024)
    b = to_bits(torch.randn(1024, 512), 4, along="columns")
    with mock.patch.object(tiles, "fastest", lambda: "avx512_vnni"):
        assert planned(to_bits(sparse, 1), b).way == "planes"
        assert planned(to_bits(torch.ones(1024, 1024), 1), b).way == "bytes"


def test_gpus():
    assert on_gpu(80, 2, 2, 1.0).way == "planes" and "not measured" in on_gpu(80, 2, 2, 1.0).reason
    assert on_gpu(90, 3, 2, 1.0).way == "bytes" and on_gpu(90, 3, 2, 0.5).way == "planes"
    for sm in (100, 103, 120):
        assert on_gpu(sm, 1, 1, 1.0).way == "bytes"
        assert f"sm_{sm} has no product of bits" in on_gpu(sm, 1, 1, 1.0).reason


def test_without_a_library():
    with mock.patch.object(loader, "library", lambda: None):
        assert on_cpu(8, 8, 64, 2048, 1.0).way == "planes"
        a = to_bits(torch.randn(3, 40), 2)
        b = to_bits(torch.randn(40, 5), 2, along="columns")
        assert torch.equal((a @ b).long(), a.codes().long() @ b.codes().long())
