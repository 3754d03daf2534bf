"""gradient_pack, gradient_sum and gradient_unpack: the references against numpy, value by value, and every fused
implementation against the references, bit by bit."""

import math

import numpy
import pytest
import torch

from lsq.ops import random
from lsq.ops.gradient_layout import BLOCKS, MessageLayout
from lsq.ops.registry import definition
from tests.ops.compare import KEY, fused
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
    """Compare the CPU implementation with the reference; returns the reference's outputs."""
    expected = definition(name).reference(*inputs, **attributes)
    assert_same(fused(name, *inputs, **attributes), expected)
    return expected


def numpy_block(x: numpy.ndarray, largest_code: int, uniform: numpy.ndarray | None):
    """(codes, scale, error) of one block float32, written down again from the definition."""
    largest = numpy.float32(numpy.abs(x).max())
    if not numpy.isfinite(x).all():
        return numpy.zeros(len(x), numpy.int8), numpy.float32(numpy.nan), numpy.zeros(len(x), numpy.float32)
    if largest < numpy.float32(1e-35):
        return numpy.zeros(len(x), numpy.int8), numpy.float32(0), x
    bits = -(-(largest / numpy.float32(largest_code)).view(numpy.uint32).item() // 65536)  # a bfloat16's, rounded up
    scale = numpy.uint32(65536 * bits).view(numpy.float32)
    reciprocal = numpy.float32(1) / scale
    codes = numpy.rint(x * reciprocal) if uniform is None else numpy.floor(x * reciprocal + uniform)
    codes = codes.clip(-largest_code, largest_code).astype(numpy.int8)
    return codes, scale, x - codes.astype(numpy.float32) * scale


def numpy_message(x: numpy.ndarray, layout: MessageLayout, uniform: numpy.ndarray | None):
    """(message, error) of one shard float32 [L]."""
    starts = range(0, layout.length, layout.block)
    cut = [slice(start, min(start + layout.block, layout.length)) for start in starts]
    blocks = [numpy_block(x[s], layout.largest_code, None if uniform is None else uniform[s]) for s in cut]
    codes = numpy.concatenate([block[0] for block in blocks])
    if layout.bits == 4:
        nibbles = codes.astype(numpy.int64) % 16
        codes = (nibbles[0::2] + 16 * nibbles[1::2]).astype(numpy.uint8)
    written = codes.tobytes() + b"".join(block[1].tobytes()[2:] for block in blocks)
    padded = written + bytes(-len(written) % 16)
    return numpy.frombuffer(padded, numpy.uint8).copy(), numpy.concatenate([block[2] for block in blocks])


def numpy_values(message: numpy.ndarray, layout: MessageLayout) -> numpy.ndarray:
    """Float32 [L] of one message."""
    raw = message.tobytes()
    codes = numpy.frombuffer(raw[: layout.code_bytes], numpy.int8)
    if layout.bits == 4:
        halves = [[(byte + 8) % 16 - 8, ((byte >> 4) + 8) % 16 - 8] for byte in codes.astype(numpy.int64) % 256]
        codes = numpy.array(halves).flatten()
    halves = numpy.frombuffer(raw[layout.code_bytes : layout.code_bytes + 2 * layout.blocks], numpy.uint16)
    scales = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
    return codes.astype(numpy.float32) * numpy.repeat(scales, layout.block)[: layout.length]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("values, shards, block", [(1, 1, 256), (1, 3, 32), (333, 1, 64), (1000, 3, 256), (70, 8, 32)])
def test_references_against_numpy(values, shards, block, bits, stochastic):
    layout = MessageLayout.for_values(values, shards, block=block, bits=bits)
    x = gradients(2, values)
    if values > 500:
        x[1, 300], x[:, 352:608] = math.inf, 1e-36
    options = of_pack(layout, stochastic=stochastic, stream=3, error=True)
    messages, error = definition("gradient_pack").reference(x, KEY, **options)
    whole = numpy.zeros(shards * layout.length, numpy.float32)
    whole[:values] = (x[0] + x[1]).numpy()
    uniform = random.uniform(KEY, 3, (shards, layout.length)).numpy() if stochastic else [None] * shards
    made = [numpy_message(part, layout, u) for part, u in zip(whole.reshape(shards, -1), uniform, strict=True)]
    assert_same([messages], [torch.from_numpy(numpy.stack([message for message, _ in made]))])
    assert_same([error], [torch.from_numpy(numpy.concatenate([rest for _, rest in made])[:values])])
    (back,) = definition("gradient_unpack").reference(messages[None], **of_unpack(layout, factor=0.3))
    expected = numpy.concatenate([numpy_values(message, layout) for message, _ in made])[:values] * numpy.float32(0.3)
    assert_same([back], [torch.from_numpy(expected)])


@pytest.mark.parametrize("bits, out_bits", [(8, 8), (4, 8), (4, 4)])
def test_a_sum_against_numpy(bits, out_bits):
    layout, messages = packed(1000, 5, bits=bits)
    messages = messages[:, 0]
    total = numpy_values(messages[0].numpy(), layout)
    for message in messages[1:]:
        total = total + numpy_values(message.numpy(), layout)
    out_layout = MessageLayout.of_shard(layout.length, bits=out_bits)
    expected, _ = numpy_message(total * numpy.float32(0.2), out_layout, None)
    (found,) = definition("gradient_sum").reference(
        messages, None, length=layout.length, bits=bits, out_bits=out_bits, factor=0.2
    )
    assert_same([found], [torch.from_numpy(expected)])


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (4097, 2)])
def test_pack(values, shards, bits, dtype, rows):
    layout = MessageLayout.for_values(values, shards, bits=bits)
    x = gradients(rows, values, dtype)
    _, error = check("gradient_pack", x, None, **of_pack(layout, error=True))
    check("gradient_pack", x, KEY, **of_pack(layout, error=True, stochastic=True, stream=5))
    _, none = check("gradient_pack", x, KEY, **of_pack(layout))
    assert none is None and error.abs().max() <= x.float().sum(0).abs().max() / layout.largest_code


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, bits):
    layout = MessageLayout.for_values(5000, 2, block=block, bits=bits)
    for stochastic in (False, True):
        options = of_pack(layout, error=True, stochastic=stochastic)
        messages, _ = check("gradient_pack", gradients(1, 5000), KEY, **options)
        sums = {"length": layout.length, "bits": bits, "block": block, "stochastic": stochastic}
        check("gradient_sum", messages, KEY, **sums)
        check("gradient_sum", messages, KEY, **sums, out_bits=4)
        check("gradient_unpack", messages[None], **of_unpack(layout))


@pytest.mark.parametrize("count", range(1, 10))
def test_sum(count):
    for bits in (8, 4):
        layout, messages = packed(1000, count, bits=bits)
        options = {"length": layout.length, "bits": bits, "factor": 1 / count}
        check("gradient_sum", messages[:, 0], None, **options)
        check("gradient_sum", messages[:, 0], KEY, **options, stochastic=True, stream=2)


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3)])
def test_unpack(values, shards, dtype, copies):
    for bits in (8, 4):
        layout, messages = packed(values, copies, shards=shards, bits=bits)
        check("gradient_unpack", messages, **of_unpack(layout, factor=0.7, dtype=dtype))
        check("gradient_unpack", messages, **of_unpack(layout, factor=1e6, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_is_widened(dtype):
    layout = MessageLayout.for_values(2**16, 1, block=32)
    check("gradient_pack", every_half(dtype), None, **of_pack(layout, error=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_narrowed(dtype):
    layout, messages = any_scale(2**16)
    for copies in (messages, messages.expand(2, -1, -1).contiguous()):
        check("gradient_unpack", copies, **of_unpack(layout, dtype=dtype))
        check("gradient_unpack", copies, **of_unpack(layout, dtype=dtype, factor=1e-30))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", WORST)
def test_what_is_not_finite_poisons_its_block(value, dtype, bits):
    layout = MessageLayout.for_values(1000, 2, block=64, bits=bits)
    x = gradients(1, 1000, dtype)
    x[0, 700] = value
    for stochastic in (False, True):
        messages, error = check("gradient_pack", x, KEY, **of_pack(layout, error=True, stochastic=stochastic))
        assert layout.scales(messages).isnan().nonzero().tolist() == [[1, 2]]  # 700 = 512 + 188
        assert error.isfinite().all() and not error[640:704].any()
    (found,) = check("gradient_unpack", messages[None], **of_unpack(layout, dtype=dtype))
    assert found.isnan().nonzero().flatten().tolist() == list(range(640, 704))
    sums = {"length": layout.length, "bits": bits, "block": 64, "stochastic": True}
    (total,) = check("gradient_sum", messages, KEY, **sums)
    assert MessageLayout.of_shard(512, block=64).scales(total).isnan().nonzero().tolist() == [[2]]


def test_a_sum_that_overflows_is_not_finite():
    layout = MessageLayout.for_values(64, 1, block=32)
    x = torch.full((1, 64), 3e38)
    x[0, 32:] = 1.0
    messages, _ = check("gradient_pack", x, None, **of_pack(layout))
    (total,) = check("gradient_sum", messages.expand(2, -1).contiguous(), None, length=64, block=32)
    assert layout.scales(total).isnan().tolist() == [True, False]
    messages, error = check("gradient_pack", x.expand(2, -1).contiguous(), None, **of_pack(layout, error=True))
    assert layout.scales(messages).isnan().tolist() == [[True, False]] and not error[:32].any()


@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-40, 9e-36])
def test_vanishing_blocks_become_zero(largest):
    layout = MessageLayout.for_values(96, 1, block=32)
    x = torch.randn(1, 96)
    x[0, 32:64] = largest * torch.linspace(-1, 1, 32)
    for stochastic in (False, True):
        messages, error = check("gradient_pack", x, KEY, **of_pack(layout, error=True, stochastic=stochastic))
        assert not layout.codes(messages)[0, 32:64].any() and layout.scales(messages)[0, 1] == 0
        assert torch.equal(error[32:64], x[0, 32:64])
        check("gradient_sum", messages, KEY, length=96, block=32, stochastic=stochastic)


@pytest.mark.parametrize("largest", [1.1e-35, 3.4e38])
def test_the_ends_of_the_range(largest):
    for bits in (8, 4):
        layout = MessageLayout.for_values(64, 1, bits=bits)
        x = largest * torch.linspace(-1, 1, 64)[None]
        messages, _ = check("gradient_pack", x, None, **of_pack(layout, error=True))
        assert layout.scales(messages).isfinite().all()
        check("gradient_sum", messages, None, length=64, bits=bits)


def test_ties_go_to_even_codes():
    layout = MessageLayout.for_values(256, 1, block=256)
    x = torch.cat([torch.arange(-126.5, 127.0), torch.tensor([127.0, 0.0])])[None]
    messages, _ = check("gradient_pack", x, None, **of_pack(layout))
    assert layout.codes(messages)[0, :5].tolist() == [-126, -126, -124, -124, -122]


def test_rounding_at_random_has_no_bias():
    layout = MessageLayout.for_values(4096, 1, bits=4)
    x = torch.full((1, 4096), 0.3)
    x[0, ::128] = 7.0
    messages, _ = check("gradient_pack", x, KEY, **of_pack(layout, stochastic=True))
    (found,) = check("gradient_unpack", messages[None], **of_unpack(layout))
    up = found.view(32, 128)[:, 1:]
    assert set(up.unique().tolist()) == {0.0, 1.0} and abs(up.mean() - 0.3) < 5 * (0.21 / up.numel()) ** 0.5


@pytest.mark.parametrize("name, inputs, attributes, said", [
    ("gradient_pack", (torch.zeros(9), None), {"shards": 1, "length": 32}, r"shape \[9\]; it takes \[R, v\]"),
    ("gradient_pack", (torch.zeros(1, 33), None), {"shards": 1, "length": 32}, "do not hold 33 values"),
    ("gradient_pack", (torch.zeros(1, 9), None), {"shards": 1, "length": 32, "stochastic": True}, "random key"),
    ("gradient_sum", (torch.zeros(2, 48, dtype=torch.uint8), None), {"length": 64}, r"\[2, 48\]; for shards of 64"),
    ("gradient_sum", (torch.zeros(2, 80), None), {"length": 64}, "torch.float32"),
    ("gradient_sum", (torch.zeros(2, 80, dtype=torch.uint8), None), {"length": 64, "stochastic": True}, "random key"),
    ("gradient_unpack", (torch.zeros(1, 1, 80, dtype=torch.uint8),), {"length": 64, "values": 65}, "do not hold 65"),
    ("gradient_unpack", (torch.zeros(1, 80, dtype=torch.uint8),), {"length": 64, "values": 64}, r"\[R, S, M\]"),
])
def test_what_is_refused(name, inputs, attributes, said):
    with pytest.raises(ValueError, match=said):
        definition(name).reference(*inputs, **attributes)
