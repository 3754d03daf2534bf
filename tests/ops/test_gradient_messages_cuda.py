"""gradient_pack, gradient_sum and gradient_unpack on CUDA: the bits of the references."""

import pytest
import torch

from lsq.csrc.launch import Launch
from lsq.ops.gradient_layout import BLOCKS, MessageLayout
from lsq.ops.registry import definition
from tests.ops import cuda
from tests.ops.compare import KEY
from tests.ops.gradient_checks import (
    WORST,
    any_scale,
    assert_same,
    every_half,
    gradients,
    of_pack,
    of_unpack,
    packed,
)
from tests.ops.operands import DTYPES


def check(name: str, *inputs, **attributes) -> tuple:
    """Compare the CUDA implementation with the reference, forwards and backwards; returns the reference's outputs."""
    expected = definition(name).reference(*inputs, **attributes)
    for order in cuda.ORDERS:
        found = cuda.run(
            definition(name), inputs, expected, None, (), (), attributes, order=order, slots=order > 0
        )
        assert_same(found, expected)
    return expected


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (4097, 2)])
def test_pack(values, shards, dtype, rows):
    x = gradients(rows, values, dtype)
    layout = MessageLayout.for_values(values, shards)
    check("gradient_pack", x, None, **of_pack(layout, error=True))
    check("gradient_pack", x, KEY, **of_pack(layout))
    layout = MessageLayout.for_values(values, shards, bits=4)
    check("gradient_pack", x, KEY, **of_pack(layout, error=True, stochastic=True, stream=5))


@pytest.mark.parametrize("bits, stochastic", [(8, False), (4, True)])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, bits, stochastic):
    layout = MessageLayout.for_values(5000, 2, block=block, bits=bits)
    for rows in (1, 3):
        options = of_pack(layout, error=True, stochastic=stochastic)
        messages, _ = check("gradient_pack", gradients(rows, 5000), KEY, **options)
    sums = {"length": layout.length, "bits": bits, "block": block, "stochastic": stochastic}
    check("gradient_sum", messages, KEY, **sums, out_bits=12 - bits)
    check("gradient_unpack", messages[None], **of_unpack(layout))


@pytest.mark.parametrize("count", range(1, 10))
def test_sum(count):
    for bits in (8, 4):
        layout, messages = packed(1000, count, bits=bits)
        options = {"length": layout.length, "bits": bits, "factor": 1 / count}
        check("gradient_sum", messages[:, 0].contiguous(), None, **options)
        check("gradient_sum", messages[:, 0].contiguous(), KEY, **options, stochastic=True, stream=2)


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (5000, 1)])
def test_unpack(values, shards, dtype, copies):
    for bits in (8, 4):
        layout, messages = packed(values, copies, shards=shards, bits=bits)
        check("gradient_unpack", messages, **of_unpack(layout, factor=0.7, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_is_widened(dtype):
    layout = MessageLayout.for_values(2**16, 1, block=32)
    check("gradient_pack", every_half(dtype), None, **of_pack(layout, error=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_narrowed(dtype):
    layout, messages = any_scale(2**14)
    check("gradient_unpack", messages, **of_unpack(layout, dtype=dtype))


@pytest.mark.parametrize("block", [32, 1024])
@pytest.mark.parametrize("value", WORST)
def test_what_is_not_finite_poisons_its_block(value, block):
    for bits, stochastic in ((8, False), (4, True)):
        layout = MessageLayout.for_values(3000, 2, block=block, bits=bits)
        x = gradients(1, 3000)
        x[0, 700] = value
        messages, _ = check("gradient_pack", x, KEY, **of_pack(layout, error=True, stochastic=stochastic))
        assert layout.scales(messages).isnan().nonzero().tolist() == [[0, 700 // block]]
        sums = {"length": layout.length, "bits": bits, "block": block, "stochastic": stochastic}
        check("gradient_sum", messages, KEY, **sums, out_bits=12 - bits)
        check("gradient_unpack", messages[None], **of_unpack(layout))


@pytest.mark.parametrize("largest", [0.0, 9e-36, 1.1e-35, 3.4e38])
def test_the_ends_of_the_range(largest):
    layout = MessageLayout.for_values(96, 1, block=32)
    x = torch.randn(1, 96)
    x[0, 32:64] = largest * torch.linspace(-1, 1, 32)
    for stochastic in (False, True):
        messages, _ = check("gradient_pack", x, KEY, **of_pack(layout, error=True, stochastic=stochastic))
        check("gradient_sum", messages, KEY, length=96, block=32, factor=2.0, stochastic=stochastic)


def test_a_shard_for_each_block_of_threads_in_the_second_dimension():
    layout = MessageLayout(values=65536 * 32, shards=65536, length=32)
    x, messages = (torch.empty(shape, device="meta") for shape in ((1, 65536 * 32), (65536, 48)))
    with pytest.raises(ValueError, match="65536 shards cannot be launched at once on CUDA"):
        definition("gradient_pack").cuda(x, None, messages, None, **of_pack(layout))


def test_threads_cover_the_values():
    """No block of threads is idle, and none is missing."""
    for block in BLOCKS:
        layout = MessageLayout.for_values(100_000, 3, block=block)
        x, messages = torch.empty(1, 100_000, device="meta"), torch.empty(3, layout.message_bytes, device="meta")
        (entry,) = definition("gradient_pack").cuda(x, None, messages, None, **of_pack(layout))
        covered = 256 * 8 * max(1, block // 256)
        assert isinstance(entry, Launch) and entry.grid == (-(-layout.length // covered), 3, 1)
