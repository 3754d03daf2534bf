"""Multiplications by warpgroups in the emulator: layouts, order, faults."""

import shutil

import pytest
import torch

from lsq.emulator import profile
from lsq.native.launch import launch
from tests.emulator.emulated import FOLDER, ORDERS, CudaError, Module, memory

SOURCE = "warpgroups.cu"
COLUMNS = (64, 128, 256)


def module(order=0, columns=64):
    return Module(SOURCE, order, defines=(("COLUMNS", columns),))


def codes(*shape):
    return torch.randint(
        -128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(3)
    )


def multiplied(order=0, columns=64, fault=0):
    """What is found of a product, and what was to be found."""
    a, b = codes(64, 64), codes(columns, 64)
    sums = torch.arange(64 * columns, dtype=torch.int32).reshape(64, columns)
    expected = sums + a.int() @ b.int().t()
    shared = 64 * (64 + columns)
    given = a.data_ptr(), b.data_ptr(), sums.data_ptr(), fault
    module(order, columns).launch("one_product", 1, 128, *given, shared=shared)
    return sums, expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_product(order, columns):
    found, expected = multiplied(order, columns)
    assert torch.equal(found, expected)


def test_sums_wrap_around():
    a, b = (
        torch.full((64, 64), -128, dtype=torch.int8),
        torch.full((64, 64), -128, dtype=torch.int8),
    )
    sums = torch.full((64, 64), 2**31 - 1, dtype=torch.int32)
    module().launch(
        "one_product", 1, 128, a.data_ptr(), b.data_ptr(), sums.data_ptr(), 0, shared=8192
    )
    assert sums.unique().tolist() == [-(2**31) - 1 + 128 * 128 * 64]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            1,
            r"begins wgmma of shared memory that thread \d+ wrote with no fence.proxy.async behind"
            r" it",
        ),
        (
            2,
            r"begins wgmma of shared memory that thread \d+ wrote with no fence.proxy.async behind"
            r" it",
        ),
        (
            3,
            r"shared memory that (a copy|wgmma|warp \d|several warps) .*(still|with no"
            r" __syncthreads)",
        ),
        (4, r"gives the descriptor 0x\w+ to wgmma \(.*\), whose matrix is not swizzled"),
        (5, r"whose rows of 32 values do not begin within the first row of its swizzle"),
        (6, r"gives 0x\w+ to wgmma \(warpgroup.cuh:\d+\), which is not shared memory"),
        (7, r"whose groups of eight rows do not lie at a multiple of 512"),
        (8, r"begins wgmma \(.*\) with no wgmma.fence"),
        (9, r"the warps of its warpgroup 0 do not begin the same wgmma"),
        (10, r"writes shared memory that wgmma still reads, which has not been waited for"),
        (11, r"writes shared memory that wgmma still reads, which has not been waited for"),
        (
            13,
            r"writes shared memory that (wgmma still reads|(warp \d|several warps) read with no"
            r" __syncthreads)",
        ),
        (14, r"begins wgmma \(.*\) with no wgmma.fence"),
    ],
)
def test_what_is_wrong_is_reported(order, fault, message):
    with pytest.raises(CudaError, match=message):
        multiplied(order, fault=fault)


def test_sums_that_nobody_waited_for_are_rubbish():
    found, expected = multiplied(fault=12)
    assert found.unique().numel() == 1 and not torch.equal(found, expected)
    found, expected = multiplied()  # nothing of it is left
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_groups_are_done_one_after_another(order):
    a, b, out = codes(64, 64), codes(64, 64), torch.zeros(3, 128, dtype=torch.int32)
    module(order).launch(
        "two_groups", 1, 128, a.data_ptr(), b.data_ptr(), out.data_ptr(), shared=8192
    )
    rows = torch.arange(128) // 32 * 16 + torch.arange(128) % 32 // 4
    columns = torch.arange(128) % 4 * 2
    first, second = (a[:, half].int() @ b[:, half].int().t() for half in (slice(32), slice(32, 64)))
    assert torch.equal(out[0], first[rows, columns]) and torch.equal(out[2], second[rows, columns])
    assert out[1].unique().numel() == 1


@pytest.mark.parametrize("order", ORDERS)
def test_all_lanes_come_together(order):
    with pytest.raises(CudaError, match="some lanes of the mask of wgmma.fence do not arrive"):
        module(order).launch("halves", 1, 128, memory(128))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="instructions are counted by objdump")
def test_counts():
    """Two multiplications of each of four warps; copies meet in no bank."""
    given = codes(64, 64), codes(64, 64), torch.zeros(64, 64, dtype=torch.int32), 0
    entry = launch(
        str(FOLDER / SOURCE), "one_product", *given, grid=1, block=128, shared=8192, COLUMNS=64
    )
    (found,) = profile.profile([entry])
    assert found.instructions["wgmma"] == 8 and found.shared_passes == found.shared_least
