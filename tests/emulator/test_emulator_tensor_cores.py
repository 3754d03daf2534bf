"""Tensor cores, warpgroups, matrices from shared memory and copies beside the threads in the
emulator: layouts, order, faults."""

import shutil

import pytest
import torch

from lsq.emulator import profile
from lsq.models.sparsity import choose, pack
from lsq.native.launch import launch
from tests.emulator.emulated import FOLDER, ORDERS, Module, fails, memory

SOURCE = "tensor_cores.cu"
STILL = r"a copy of thread \d+ still fills"
THREADS = {4: 128, 8: 64, 16: 32}
"""That copy 128 words, by the bytes of a copy."""


def module(order=0, source=SOURCE, **defines):
    return Module(source, order, defines=tuple(defines.items()))


def warpgroup(order=0, COLUMNS=64):
    return module(order, "warpgroups.cu", COLUMNS=COLUMNS)


def codes(*shape):
    return torch.randint(
        -128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(3)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_multiplication(order):
    a, b = codes(16, 32), codes(8, 32)
    sums = torch.arange(128, dtype=torch.int32).reshape(16, 8)
    expected = sums + a.int() @ b.int().t()
    module(order).launch("one_multiplication", 1, 32, a, b, sums)
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_multiplication_of_bits(order):
    a, b = codes(16, 32), codes(8, 32)
    a[3], b[5] = -1, -1  # all 256 bits
    sums = torch.arange(128, dtype=torch.int32).reshape(16, 8)
    sums[15, 7] = 2**31 - 1  # wraps around
    before = sums.clone()
    module(order, BITS=1).launch("one_multiplication", 1, 32, a, b, sums)
    whole = [[int.from_bytes(bytes(row), "little") for row in x.view(torch.uint8)] for x in (a, b)]
    common = [[(row & column).bit_count() for column in whole[1]] for row in whole[0]]
    assert common[3][5] == 256
    assert torch.equal(sums, before + torch.tensor(common, dtype=torch.int32))


@pytest.mark.parametrize("order", ORDERS)
def test_a_sparse_multiplication(order):
    a, b = codes(16, 64), codes(8, 64)
    a *= choose(torch.rand(16, 64, generator=torch.Generator().manual_seed(5)))
    packed, sums = pack(a), torch.arange(128, dtype=torch.int32).reshape(16, 8)
    expected = sums + a.int() @ b.int().t()
    operands = (packed.values, packed.indices, b, sums)
    module(order).launch("one_sparse_multiplication", 1, 32, *operands)
    assert torch.equal(sums, expected)


def test_places_out_of_order_end_the_launch():
    kept = torch.full((16, 8), 0x44, dtype=torch.uint8)
    kept[3, 5] = 0x41
    operands = codes(16, 32), kept, codes(8, 64), codes(16, 32)
    with fails("mma.sp.*places 1 and 0"):
        module().launch("one_sparse_multiplication", 1, 32, *operands)


@pytest.mark.parametrize("order", ORDERS)
def test_a_multiplication_of_bfloat16(order):
    draw = torch.Generator().manual_seed(4)
    a, b = (
        torch.randn(16, 16, generator=draw).bfloat16(),
        torch.randn(8, 16, generator=draw).bfloat16(),
    )
    a[2, 3], b[5] = torch.nan, 1.0
    sums = torch.randn(16, 8, generator=draw)
    expected = (sums.double() + a.double() @ b.double().t()).float()
    module(order).launch("one_bfloat16_multiplication", 1, 32, a, b, sums)
    torch.testing.assert_close(sums, expected, rtol=0, atol=2e-6, equal_nan=True)
    assert sums.isnan().sum() == 8


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(order, count, transposed):
    x = torch.arange(32 * 8, dtype=torch.int16)
    out = torch.empty(32, count, 2, dtype=torch.int16)
    defines = {"COUNT": count, "TURNED": transposed}
    module(order, **defines).launch("matrices", 1, 32, x, out, 16, 0, 0)
    found = x.reshape(4, 8, 8)[:count]
    found = found.transpose(1, 2) if transposed else found
    assert torch.equal(out, found.reshape(count, 32, 2).transpose(0, 1))


def test_rows_of_matrices_lie_in_shared_memory_and_are_aligned():
    x, out = memory(4096), memory(4096)
    with fails(r"thread \(\d+, 0, 0\) accesses 0x\w+4 .*not aligned to 16 bytes"):
        module().launch("matrices", 1, 32, x, out, 16, 4, 0)
    with fails(r"gives 0x\w+ to ldmatrix \(tensor_core.cuh:\d+\), which is not shared memory"):
        module().launch("matrices", 1, 32, memory(256), out, 16, 0, 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("fault", "words"), [(0, "mma.sync"), (1, "mma.sync .*ldmatrix")])
def test_all_lanes_come_together(order, fault, words):
    with fails("some lanes of the mask of .* do not arrive .* function") as caught:
        module(order).launch("halves", 1, 64, memory(64), fault)
    assert all(word in str(caught.value) for word in words.split(" .*"))


def copied(order, inside=128, size=16, fault=0):
    """What is found of three groups, and what was copied."""
    x, out = (
        torch.arange(3 * 128, dtype=torch.int32).reshape(3, 128),
        torch.zeros(3, 128, dtype=torch.int32),
    )
    module(order, SIZE=size).launch("copies", 1, THREADS[size], x, out, inside, fault)
    return out, x


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", THREADS)
def test_copies_arrive_in_groups(order, size):
    found, expected = copied(order, size=size)
    assert torch.equal(found, expected)
    found, expected = copied(order, inside=60, size=size)
    assert torch.equal(found[:, :60], expected[:, :60]) and not found[:, 60:].any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"reads shared memory that a copy of thread \d+ still .*, after it waited"),
        (2, rf"shared memory that ({STILL}|warp \d (wrote|read) with no barrier)"),
        (3, rf"writes shared memory that {STILL}"),
        (4, rf"writes shared memory that {STILL}"),
        (5, rf"shared memory that ({STILL}|warp \d (wrote|read) with no barrier)"),
        (6, r"accesses 0x\w+ as a vector .* not aligned to 8 bytes"),
        (7, r"gives 0x\w+ to cp.async \(.*\), which is not shared memory"),
    ],
)
def test_copies_that_are_not_waited_for(order, fault, message):
    with fails(message):
        copied(order, size=8 if fault == 6 else 4, fault=fault)


def counted(name, *arguments, block=32, **defines):
    source = str(FOLDER / SOURCE)
    (found,) = profile.profile([launch(source, name, *arguments, grid=1, block=block, **defines)])
    return found


@pytest.mark.skipif(shutil.which("objdump") is None, reason="instructions are counted by objdump")
def test_counts():
    found = counted(
        "one_multiplication", codes(16, 32), codes(8, 32), torch.zeros(16, 8, dtype=torch.int32)
    )
    # not the emulator's own
    assert found.instructions["mma"] == 1 and sum(found.instructions.values()) < 1000
    halves = torch.zeros(16, 16, dtype=torch.bfloat16)
    found = counted("one_bfloat16_multiplication", halves, halves[:8], torch.zeros(16, 8))
    assert found.instructions["mma"] == 1 and sum(found.instructions.values()) < 1000
    found = counted("pairs", torch.zeros(64), torch.zeros(32))
    assert found.instructions["convert"] == 1
    # the rows are stored by words
    for stride, conflicted in ((16, 12), (128, 28 + 124), (144, 12)):
        x, out = torch.zeros(128), torch.zeros(128)
        found = counted("matrices", x, out, stride, 0, 0)
        conflicts = found.shared_passes - found.shared_least, found.shared_least
        assert conflicts == (conflicted, 4 + 4), stride
    x, out = torch.zeros(3, 128), torch.zeros(3, 128)
    found = counted("copies", x, out, 128, 0)
    assert found.operands[0].reads == profile.Traffic(
        requests=3, bytes=1536, sectors=48, touched=48
    )
    found = counted("copies", x, out, 64, 0)
    assert found.operands[0].reads == profile.Traffic(requests=3, bytes=768, sectors=24, touched=24)


COLUMNS = (64, 128, 256)


def multiplied(order=0, columns=64, fault=0):
    """What is found of a product, and what was to be found."""
    a, b = codes(64, 64), codes(columns, 64)
    sums = torch.arange(64 * columns, dtype=torch.int32).reshape(64, columns)
    expected = sums + a.int() @ b.int().t()
    shared = 128 * (64 + columns)
    given = a, b, sums, fault
    warpgroup(order, COLUMNS=columns).launch("one_product", 1, 128, *given, shared=shared)
    return sums, expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_product(order, columns):
    found, expected = multiplied(order, columns)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"begins wgmma of shared memory that thread \d+ wrote with no fence.proxy.async"),
        (2, r"begins wgmma of shared memory that thread \d+ wrote with no fence.proxy.async"),
        (3, r"that (a copy|wgmma|warp \d) .*(still|with no barrier)"),
        (4, r"gives the descriptor 0x\w+ to wgmma \(.*\), whose matrix is not swizzled"),
        (5, r"whose rows of 32 values do not begin within the first row of its swizzle"),
        (6, r"gives 0x\w+ to wgmma \(warpgroup.cuh:\d+\), which is not shared memory"),
        (7, r"whose groups of eight rows do not lie at a multiple of 1024"),
        (8, r"begins wgmma \(.*\) with no wgmma.fence"),
        (9, r"the warps of its warpgroup 0 do not begin the same wgmma"),
        (10, r"writes shared memory that wgmma still reads, which has not been waited for"),
        (11, r"writes shared memory that wgmma still reads, which has not been waited for"),
        (13, r"writes .* that (wgmma still|(warp \d|several warps) read with no barrier)"),
        (14, r"begins wgmma \(.*\) with no wgmma.fence"),
    ],
)
def test_what_is_wrong_is_reported(order, fault, message):
    with fails(message):
        multiplied(order, fault=fault)


def test_sums_that_nobody_waited_for_are_rubbish():
    found, expected = multiplied(fault=12)
    assert found.unique().numel() == 1 and not torch.equal(found, expected)
    found, expected = multiplied()  # nothing of it is left
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_all_lanes_of_a_warpgroup_come_together(order):
    with fails("some lanes of the mask of wgmma.fence do not arrive"):
        warpgroup(order).launch("halves", 1, 128, memory(128))


def handed_over(order, fault=0):
    """What a warpgroup makes of the operands that another one copies, and what was to be found."""
    a, b = codes(64, 64), codes(64, 64)
    sums = torch.zeros(64, 64, dtype=torch.int32)
    warpgroup(order).launch("handed_over", 1, 256, a, b, sums, fault, shared=128 * 128)
    return sums, a.int() @ b.int().t()


@pytest.mark.parametrize("order", ORDERS)
def test_a_warpgroup_multiplies_what_another_one_copies(order):
    found, expected = handed_over(order)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"warp \d (wrote|read) with no barrier|wgmma still reads|has come already"),
        (2, r"begins wgmma of shared memory that thread \d+ wrote with no fence.proxy.async"),
        (3, r"writes shared memory that (wgmma still reads|warp \d read with no barrier)|still f"),
    ],
)
def test_warpgroups_that_do_not_wait_for_each_other(order, fault, message):
    with fails(message):
        handed_over(order, fault)
