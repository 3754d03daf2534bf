"""Gradient messages: references against numpy; loops and kernels against references."""

import math

import numpy
import pytest
import torch

from lsq.ops.gradient_messages import (
    BLOCKS,
    MessageLayout,
    Messages,
    PackGradients,
    SumMessages,
    UnpackGradients,
)
from tests.ops.compare import empty, on_cpu, on_reference, refused
from tests.ops.cuda import DTYPES
from tests.ops.gradient_checks import (
    add_up,
    assert_same_bits,
    assert_same_tensor,
    gradients,
    pack,
    packed,
    to_write,
    unpack,
)


@pytest.mark.parametrize(
    "values, shards, length",
    [(1, 1, 32), (32, 1, 32), (33, 1, 64), (1, 8, 32), (257, 8, 64), (1000, 3, 352)],
)
def test_shards_are_the_shortest_that_hold_the_values(values, shards, length):
    layout = MessageLayout.for_values(values, shards)
    assert (layout.values, layout.shards, layout.length) == (values, shards, length)


@pytest.mark.parametrize(
    "block, blocks, message_bytes", [(256, 2, 368), (32, 11, 384), (1024, 1, 368)]
)
def test_sizes(block, blocks, message_bytes):
    layout = MessageLayout.for_values(1000, 3, block=block)
    assert (layout.blocks, layout.message_bytes) == (blocks, message_bytes)
    assert MessageLayout.for_values(352, 1, block=block).message_bytes == message_bytes


@pytest.mark.parametrize("block", BLOCKS)
def test_views_cover_a_message(block):
    layout = MessageLayout.for_values(1000, 3, block=block)
    messages = torch.zeros(2, 3, layout.message_bytes, dtype=torch.uint8)
    layout.codes(messages).fill_(1)
    layout.scales(messages).copy_(torch.tensor(0x0202, dtype=torch.int16).view(torch.bfloat16))
    padding = messages[..., layout.length + 2 * layout.blocks :]
    padding.fill_(3)
    parts = [layout.length, 2 * layout.blocks, padding.shape[-1]]
    expected = torch.tensor([1, 2, 3], dtype=torch.uint8).repeat_interleave(torch.tensor(parts))
    assert torch.equal(messages, expected.expand(2, 3, -1))
    assert parts[-1] < 16 and layout.scales(messages).shape == (2, 3, layout.blocks)


def numpy_block(x: numpy.ndarray):
    """(codes, scale) of one block float32, written down again from the definition."""
    largest = numpy.float32(numpy.abs(x).max())
    if not numpy.isfinite(x).all():
        return numpy.zeros(len(x), numpy.int8), numpy.float32(numpy.nan)
    if largest < numpy.float32(1e-35):
        return numpy.zeros(len(x), numpy.int8), numpy.float32(0)
    # a bfloat16's, rounded up
    bits = -(-(largest / numpy.float32(127)).view(numpy.uint32).item() // 65536)
    scale = numpy.uint32(65536 * bits).view(numpy.float32)
    codes = numpy.rint(x * (numpy.float32(1) / scale)).clip(-127, 127).astype(numpy.int8)
    return codes, scale


def numpy_message(x: numpy.ndarray, layout: MessageLayout):
    """The message of one shard float32 [L]."""
    starts = range(0, layout.length, layout.block)
    blocks = [numpy_block(x[start : min(start + layout.block, layout.length)]) for start in starts]
    codes = numpy.concatenate([block[0] for block in blocks])
    written = codes.tobytes() + b"".join(block[1].tobytes()[2:] for block in blocks)
    return numpy.frombuffer(written + bytes(-len(written) % 16), numpy.uint8).copy()


def numpy_values(message: numpy.ndarray, layout: MessageLayout) -> numpy.ndarray:
    """Float32 [L] of one message."""
    raw, end = message.tobytes(), layout.length + 2 * layout.blocks
    codes = numpy.frombuffer(raw[: layout.length], numpy.int8)
    halves = numpy.frombuffer(raw[layout.length : end], numpy.uint16)
    scales = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
    return codes.astype(numpy.float32) * numpy.repeat(scales, layout.block)[: layout.length]


@pytest.mark.parametrize(
    "values, shards, block", [(1, 1, 256), (1, 3, 32), (333, 1, 64), (1000, 3, 256), (70, 8, 32)]
)
def test_references_against_numpy(values, shards, block):
    layout = MessageLayout.for_values(values, shards, block=block)
    x = gradients(2, values)
    if values > 500:
        x[1, 300], x[:, 352:608] = math.inf, 1e-36
    messages = on_reference(pack(x, layout)).messages.data
    whole = numpy.zeros(shards * layout.length, numpy.float32)
    whole[:values] = (x[0] + x[1]).numpy()
    made = [numpy_message(part, layout) for part in whole.reshape(shards, -1)]
    assert_same_tensor(messages, torch.from_numpy(numpy.stack(made)))
    expected = numpy.concatenate([numpy_values(message, layout) for message in made])[:values]
    for copies, total in ((1, expected), (2, expected + expected)):
        back = on_reference(unpack(torch.stack([messages] * copies), layout, factor=0.3)).x
        assert_same_tensor(back, torch.from_numpy(total * numpy.float32(0.3)))


def test_a_sum_against_numpy():
    layout, messages = packed(1000, 5)
    messages = messages[:, 0]
    total = numpy_values(messages[0].numpy(), layout)
    for message in messages[1:]:
        total = total + numpy_values(message.numpy(), layout)
    out_layout = MessageLayout.for_values(layout.length, 1)
    expected = numpy_message(total * numpy.float32(0.2), out_layout)
    found = on_reference(add_up(messages, layout, factor=0.2)).sum.data
    assert_same_tensor(found, torch.from_numpy(expected))


@pytest.fixture
def check(runs):
    """Compare loops or kernels with the reference; what that made."""

    def same(operation):
        expected = on_reference(operation)
        for found in runs(operation):
            assert_same_bits(found, expected)
        return expected

    return same


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (4097, 2)])
def test_pack(values, shards, dtype, rows, check):
    check(pack(gradients(rows, values, dtype), MessageLayout.for_values(values, shards)))


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, check):
    layout = MessageLayout.for_values(5000, 2, block=block)
    for rows in (1, 3):
        messages = check(pack(gradients(rows, 5000), layout)).messages.data
    check(add_up(messages, layout))
    check(unpack(messages[None], layout))


@pytest.mark.parametrize("count", range(1, 10))
def test_sum(count, check):
    layout, messages = packed(1000, count)
    check(add_up(messages[:, 0].contiguous(), layout, factor=1 / count))


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (5000, 1)])
def test_unpack(values, shards, dtype, copies, check):
    layout, messages = packed(values, copies, shards=shards)
    check(unpack(messages, layout, factor=0.7, dtype=dtype))
    check(unpack(messages, layout, factor=1e6, dtype=dtype))


def test_every_half_is_widened(check):
    """All 65,536 values of a bfloat16, neighbours side by side."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)[None]
    check(pack(x, MessageLayout.for_values(2**16, 1, block=32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_narrowed(dtype, where, check):
    """Of scales that are any bits."""
    layout = MessageLayout.for_values(2**16 if where == "cpu" else 2**14, 1, block=32)
    messages = torch.randint(0, 256, (1, 1, layout.message_bytes), dtype=torch.uint8)
    for copies in (messages, messages.expand(2, -1, -1).contiguous()):
        check(unpack(copies, layout, dtype=dtype))
        check(unpack(copies, layout, dtype=dtype, factor=1e-30))


@pytest.mark.parametrize("block", [32, 64, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_poisons_its_block(value, dtype, block, check):
    layout = MessageLayout.for_values(3000, 2, block=block)
    x, number = gradients(1, 3000, dtype), 700 // block
    x[0, 700] = value
    messages = check(pack(x, layout)).messages.data
    assert layout.scales(messages).isnan().nonzero().tolist() == [[0, number]]
    found = check(unpack(messages[None], layout, dtype=dtype)).x.isnan().nonzero().flatten()
    assert found.tolist() == list(range(number * block, (number + 1) * block))
    total = check(add_up(messages, layout)).sum.data
    scales = MessageLayout.for_values(layout.length, 1, block=block).scales(total)
    assert scales.isnan().nonzero().tolist() == [[number]]


def test_a_sum_that_overflows_is_not_finite(check):
    layout = MessageLayout.for_values(64, 1, block=32)
    x = torch.full((1, 64), 3e38)
    x[0, 32:] = 1.0
    messages = check(pack(x, layout)).messages.data
    total = check(add_up(messages.expand(2, -1).contiguous(), layout)).sum.data
    assert layout.scales(total).isnan().tolist() == [True, False]
    made = check(pack(x.expand(2, -1).contiguous(), layout))
    assert layout.scales(made.messages.data).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-40, 9e-36, 1.1e-35, 3.4e38])
def test_the_ends_of_the_range(largest, check):
    """Blocks that vanish become zero."""
    layout = MessageLayout.for_values(96, 1, block=32)
    x = torch.randn(1, 96)
    x[0, 32:64] = largest * torch.linspace(-1, 1, 32)
    messages = check(pack(x, layout)).messages.data
    codes, scales = layout.codes(messages)[0, 32:64], layout.scales(messages)
    assert scales.isfinite().all() and bool(codes.any()) == bool(scales[0, 1]) == (largest > 1e-35)
    check(add_up(messages, layout))
    check(add_up(messages, layout, factor=2.0))


def test_ties_go_to_even_codes(check):
    layout = MessageLayout.for_values(256, 1, block=256)
    x = torch.cat([torch.arange(-126.5, 127.0), torch.tensor([127.0, 0.0])])[None]
    messages = check(pack(x, layout)).messages.data
    assert layout.codes(messages)[0, :5].tolist() == [-126, -126, -124, -124, -122]


def many_shards() -> PackGradients:
    layout = MessageLayout(values=2**21, shards=2**16, length=32)
    data = torch.empty(layout.shards, layout.message_bytes, dtype=torch.uint8, device="meta")
    x = torch.empty(1, layout.values, device="meta")
    return PackGradients(x=x, messages=Messages(layout=layout, data=data))


def test_two_hops_are_close_to_the_mean():
    """What eight processes do: pack, exchange shards, sum, exchange sums, unpack."""
    world = 8
    layout = MessageLayout.for_values(5003, world)
    x = torch.randn(world, 5003)
    sent = torch.stack([on_cpu(pack(row[None], layout)).messages.data for row in x])
    shards = [sent[:, shard].contiguous() for shard in range(world)]
    sums = torch.stack([on_cpu(add_up(one, layout, factor=1 / world)).sum.data for one in shards])
    found, mean = on_cpu(unpack(sums[None], layout)).x, x.mean(0)
    assert (found - mean).norm() / mean.norm() < 0.015


LAYOUT = MessageLayout.for_values(1000, 2)
MESSAGES = torch.zeros(2, LAYOUT.message_bytes, dtype=torch.uint8)
OTHER = to_write(MessageLayout.for_values(512, 1, block=32))
ROW = torch.zeros(1, 1000)


def layout_of(**fields) -> MessageLayout:
    return MessageLayout(**{"values": 9, "length": 32} | fields)


def messages_of(data) -> Messages:
    return Messages(layout=LAYOUT, data=data)


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda: layout_of(values=0), "1 shards of 32 do not hold 0 values"),
        (lambda: layout_of(length=40), "length of a shard is 40"),
        (lambda: layout_of(block=48), "block is 48"),
        (lambda: layout_of(values=65, shards=2), "2 shards of 32 do not hold 65 values"),
        (lambda: many_shards().cuda(), "65536 shards cannot be launched at once on CUDA"),
        (lambda: pack(torch.zeros(1000), LAYOUT), r"\[1000\]; .* wants \[at least one row, 1000\]"),
        (lambda: pack(torch.zeros(1, 999), LAYOUT), r"pack are \[1, 999\]"),
        (lambda: pack(torch.zeros(0, 1000), LAYOUT), r"\[0, 1000\]; the layout wants \[at least"),
        (lambda: PackGradients(x=ROW, messages=to_write(LAYOUT)), r"messages are \[528\]"),
        (lambda: add_up(MESSAGES[:, :48], LAYOUT), r"\[2, 48\]; the layout wants"),
        (lambda: SumMessages(messages=messages_of(MESSAGES), sum=OTHER), "both the same layout"),
        (lambda: unpack(MESSAGES, LAYOUT), r"\[2, 528\]; the layout wants \[at least one copy, 2"),
        (lambda: UnpackGradients(messages=messages_of(MESSAGES[None]), x=empty(999)), r"\[999\]"),
        (lambda: on_cpu(pack(ROW.expand(2, -1), LAYOUT)), "must be a contiguous tensor"),
    ],
)
def test_what_is_refused(made, said):
    with refused(said):
        made()
