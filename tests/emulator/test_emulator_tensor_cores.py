"""Tensor cores, matrices from shared memory and copies beside the threads in the emulator: layouts,
order, faults."""

import shutil

import pytest
import torch

from lsq.emulator import profile
from lsq.models.sparsity import choose, pack
from lsq.native.launch import launch
from tests.emulator.emulated import FOLDER, ORDERS, CudaError, Module, memory

SOURCE = "tensor_cores.cu"
THREADS = {4: 128, 8: 64, 16: 32}
"""That copy 128 words, by the bytes of a copy."""


def module(order=0, **defines):
    return Module(SOURCE, order, defines=tuple(defines.items()))


def codes(*shape):
    return torch.randint(
        -128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(3)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_multiplication(order):
    a, b = codes(16, 32), codes(8, 32)
    sums = torch.arange(128, dtype=torch.int32).reshape(16, 8)
    expected = sums + a.int() @ b.int().t()
    module(order).launch("one_multiplication", 1, 32, a.data_ptr(), b.data_ptr(), sums.data_ptr())
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_sparse_multiplication(order):
    a, b = codes(16, 64), codes(8, 64)
    a *= choose(torch.rand(16, 64, generator=torch.Generator().manual_seed(5)))
    packed, sums = pack(a), torch.arange(128, dtype=torch.int32).reshape(16, 8)
    expected = sums + a.int() @ b.int().t()
    operands = (packed.values, packed.indices, b, sums)
    module(order).launch("one_sparse_multiplication", 1, 32, *(one.data_ptr() for one in operands))
    assert torch.equal(sums, expected)


def test_places_out_of_order_end_the_launch():
    values, kept, b, sums = (
        codes(16, 32),
        torch.full((16, 8), 0x44, dtype=torch.uint8),
        codes(8, 64),
        codes(16, 32),
    )
    kept[3, 5] = 0x41
    with pytest.raises(CudaError, match="mma.sp.*places 1 and 0"):
        module().launch(
            "one_sparse_multiplication", 1, 32, *(one.data_ptr() for one in (values, kept, b, sums))
        )


def test_sums_wrap_around():
    a, b = torch.full((16, 32), -128, dtype=torch.int8), torch.full((8, 32), -128, dtype=torch.int8)
    sums = torch.full((16, 8), 2**31 - 1, dtype=torch.int32)
    module().launch("one_multiplication", 1, 32, a.data_ptr(), b.data_ptr(), sums.data_ptr())
    assert sums.unique().tolist() == [-(2**31) - 1 + 128 * 128 * 32]


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
    module(order).launch(
        "one_bfloat16_multiplication", 1, 32, a.data_ptr(), b.data_ptr(), sums.data_ptr()
    )
    torch.testing.assert_close(sums, expected, rtol=0, atol=2e-6, equal_nan=True)
    assert sums.isnan().sum() == 8


def test_codes_are_exact_as_bfloat16():
    """As are their sums below 2^24."""
    a, b = codes(16, 16), codes(8, 16)
    sums = torch.full((16, 8), 2.0**24 - 2**19)
    expected = sums.int() + a.int() @ b.int().t()
    a, b = a.bfloat16(), b.bfloat16()
    module().launch(
        "one_bfloat16_multiplication", 1, 32, a.data_ptr(), b.data_ptr(), sums.data_ptr()
    )
    assert torch.equal(sums.int(), expected)


def test_pairs_of_bfloat16():
    x, out = (
        torch.randn(64, generator=torch.Generator().manual_seed(5)),
        torch.zeros(64, dtype=torch.bfloat16),
    )
    module().launch("pairs", 1, 32, x.data_ptr(), out.data_ptr())
    assert torch.equal(out, x.bfloat16())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(order, count, transposed):
    x = torch.arange(32 * 8, dtype=torch.int16)
    out = torch.empty(32, count, 2, dtype=torch.int16)
    defines = {"COUNT": count, "TURNED": transposed}
    module(order, **defines).launch("matrices", 1, 32, x.data_ptr(), out.data_ptr(), 16, 0, 0)
    found = x.reshape(4, 8, 8)[:count]
    found = found.transpose(1, 2) if transposed else found
    assert torch.equal(out, found.reshape(count, 32, 2).transpose(0, 1))


def test_rows_of_matrices_lie_in_shared_memory_and_are_aligned():
    x, out = memory(4096), memory(4096)
    with pytest.raises(
        CudaError, match=r"thread \(\d+, 0, 0\) accesses 0x\w+4 .*not aligned to 16 bytes"
    ):
        module().launch("matrices", 1, 32, x, out, 16, 4, 0)
    with pytest.raises(
        CudaError,
        match=r"gives 0x\w+ to ldmatrix \(tensor_core.cuh:\d+\), which is not shared memory",
    ):
        module().launch("matrices", 1, 32, memory(256), out, 16, 0, 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("fault", "words"), [(0, "mma.sync"), (1, "mma.sync .*ldmatrix")])
def test_all_lanes_come_together(order, fault, words):
    with pytest.raises(
        CudaError, match="some lanes of the mask of .* do not arrive .* function"
    ) as caught:
        module(order).launch("halves", 1, 64, memory(64), fault)
    assert all(word in str(caught.value) for word in words.split(" .*"))


def test_a_warp_of_fewer_lanes_multiplies_nothing():
    with pytest.raises(CudaError, match="calls mma.sync .* its warp has only 16 lanes"):
        module().launch("halves", 1, 16, memory(16), 0)


def copied(order, inside=128, size=16, fault=0):
    """What is found of three groups, and what was copied."""
    x, out = (
        torch.arange(3 * 128, dtype=torch.int32).reshape(3, 128),
        torch.zeros(3, 128, dtype=torch.int32),
    )
    addresses = x.data_ptr(), out.data_ptr()
    module(order, SIZE=size).launch("copies", 1, THREADS[size], *addresses, inside, fault)
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
        (
            1,
            r"reads shared memory that a copy of thread \d+ still fills, which has not waited for"
            r" it, after it waited",
        ),
        (
            2,
            r"shared memory that (a copy of thread \d+ still fills|warp \d (wrote|read) with no"
            r" __syncthreads)",
        ),
        (3, r"writes shared memory that a copy of thread \d+ still fills"),
        (4, r"writes shared memory that a copy of thread \d+ still fills"),
        (
            5,
            r"shared memory that (a copy of thread \d+ still fills|warp \d (wrote|read) with no"
            r" __syncthreads)",
        ),
        (6, r"accesses 0x\w+ as a vector .* not aligned to 8 bytes"),
        (7, r"gives 0x\w+ to cp.async \(.*\), which is not shared memory"),
    ],
)
def test_copies_that_are_not_waited_for(order, fault, message):
    with pytest.raises(CudaError, match=message):
        copied(order, size=8 if fault == 6 else 4, fault=fault)


def test_copies_end_with_their_block():
    x, out = torch.full((32,), 9, dtype=torch.int32), torch.zeros(3, 32, dtype=torch.int32)
    for _ in range(2):
        module().launch("late", 3, 32, x.data_ptr(), out.data_ptr())
        assert (out == 7).all()


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
    for stride, conflicted in (
        (16, 12),
        (128, 28 + 124),
        (144, 12),
    ):
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
