"""PackGradients, SumMessages and UnpackGradients on CUDA: the bits of the references."""

import pytest
import torch

from lsq.native.launch import Launch
from lsq.ops.gradient_layout import BLOCKS, MessageLayout
from lsq.ops.gradient_messages import Messages, PackGradients
from tests.ops import cuda
from tests.ops.compare import on_reference
from tests.ops.cuda import DTYPES
from tests.ops.gradient_checks import (
    WORST,
    add_up,
    any_scale,
    assert_same_bits,
    every_half,
    gradients,
    pack,
    packed,
    unpack,
)


def check(operation):
    """Compare the CUDA implementation with the reference, forwards and backwards; what the
    reference made."""
    expected = on_reference(operation)
    for order in cuda.ORDERS:
        assert_same_bits(cuda.run(operation, order=order), expected)
    return expected


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (4097, 2)])
def test_pack(values, shards, dtype, rows):
    check(pack(gradients(rows, values, dtype), MessageLayout.for_values(values, shards)))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[] if block in (32, 1024) else pytest.mark.thorough)
        for block in BLOCKS
    ],
)
def test_blocks(block):
    layout = MessageLayout.for_values(5000, 2, block=block)
    for rows in (1, 3):
        messages = check(pack(gradients(rows, 5000), layout)).messages.data
    check(add_up(messages, layout))
    check(unpack(messages[None], layout))


@pytest.mark.parametrize("count", range(1, 10))
def test_sum(count):
    layout, messages = packed(1000, count)
    check(add_up(messages[:, 0].contiguous(), layout, factor=1 / count))


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (5000, 1)])
def test_unpack(values, shards, dtype, copies):
    layout, messages = packed(values, copies, shards=shards)
    check(unpack(messages, layout, factor=0.7, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_is_widened(dtype):
    check(pack(every_half(dtype), MessageLayout.for_values(2**16, 1, block=32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_narrowed(dtype):
    layout, messages = any_scale(2**14)
    check(unpack(messages, layout, dtype=dtype))


@pytest.mark.parametrize("block", [32, 1024])
@pytest.mark.parametrize("value", WORST)
def test_what_is_not_finite_poisons_its_block(value, block):
    layout = MessageLayout.for_values(3000, 2, block=block)
    x = gradients(1, 3000)
    x[0, 700] = value
    messages = check(pack(x, layout)).messages.data
    assert layout.scales(messages).isnan().nonzero().tolist() == [[0, 700 // block]]
    check(add_up(messages, layout))
    check(unpack(messages[None], layout))


@pytest.mark.parametrize("largest", [0.0, 9e-36, 1.1e-35, 3.4e38])
def test_the_ends_of_the_range(largest):
    layout = MessageLayout.for_values(96, 1, block=32)
    x = torch.randn(1, 96)
    x[0, 32:64] = largest * torch.linspace(-1, 1, 32)
    messages = check(pack(x, layout)).messages.data
    check(add_up(messages, layout, factor=2.0))


def on_meta(values: int, layout: MessageLayout) -> PackGradients:
    messages = torch.empty(layout.shards, layout.message_bytes, dtype=torch.uint8, device="meta")
    return PackGradients(
        x=torch.empty(1, values, device="meta"), messages=Messages(layout=layout, data=messages)
    )


def test_a_shard_for_each_block_of_threads_in_the_second_dimension():
    layout = MessageLayout(values=65536 * 32, shards=65536, length=32)
    with pytest.raises(ValueError, match="65536 shards cannot be launched at once on CUDA"):
        on_meta(65536 * 32, layout).cuda()


def test_threads_cover_the_values():
    """No block of threads is idle, and none is missing."""
    for block in BLOCKS:
        layout = MessageLayout.for_values(100_000, 3, block=block)
        (entry,) = on_meta(100_000, layout).cuda()
        covered = 256 * 8 * max(1, block // 256)
        assert isinstance(entry, Launch) and entry.grid == (-(-layout.length // covered), 3, 1)
