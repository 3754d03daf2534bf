"""PackGradients, SumMessages and UnpackGradients: the references against numpy, value by value, and
the CPU's loops against the references, bit by bit.
"""

import math

import numpy
import pytest
import torch

from lsq.ops.gradient_layout import BLOCKS, MessageLayout
from lsq.ops.gradient_messages import Messages, PackGradients, SumMessages, UnpackGradients
from tests.ops.compare import empty, on_cpu, on_reference
from tests.ops.cuda import DTYPES
from tests.ops.gradient_checks import (
    WORST,
    add_up,
    any_scale,
    assert_same_bits,
    assert_same_tensor,
    every_half,
    gradients,
    pack,
    packed,
    to_write,
    unpack,
)


def check(operation):
    """Compare the CPU implementation with the reference; what the reference made."""
    expected = on_reference(operation)
    assert_same_bits(on_cpu(operation), expected)
    return expected


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
    back = on_reference(unpack(messages[None], layout, factor=0.3)).x
    expected = numpy.concatenate([numpy_values(message, layout) for message in made])
    assert_same_tensor(back, torch.from_numpy(expected[:values] * numpy.float32(0.3)))


def test_a_sum_against_numpy():
    layout, messages = packed(1000, 5)
    messages = messages[:, 0]
    total = numpy_values(messages[0].numpy(), layout)
    for message in messages[1:]:
        total = total + numpy_values(message.numpy(), layout)
    out_layout = MessageLayout.of_shard(layout.length)
    expected = numpy_message(total * numpy.float32(0.2), out_layout)
    found = on_reference(add_up(messages, layout, factor=0.2)).sum.data
    assert_same_tensor(found, torch.from_numpy(expected))


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (4097, 2)])
def test_pack(values, shards, dtype, rows):
    check(pack(gradients(rows, values, dtype), MessageLayout.for_values(values, shards)))


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block):
    layout = MessageLayout.for_values(5000, 2, block=block)
    made = check(pack(gradients(1, 5000), layout)).messages.data
    check(add_up(made, layout))
    check(unpack(made[None], layout))


@pytest.mark.parametrize("count", range(1, 10))
def test_sum(count):
    layout, messages = packed(1000, count)
    check(add_up(messages[:, 0].contiguous(), layout, factor=1 / count))


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3)])
def test_unpack(values, shards, dtype, copies):
    layout, messages = packed(values, copies, shards=shards)
    check(unpack(messages, layout, factor=0.7, dtype=dtype))
    check(unpack(messages, layout, factor=1e6, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_is_widened(dtype):
    check(pack(every_half(dtype), MessageLayout.for_values(2**16, 1, block=32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_narrowed(dtype):
    layout, messages = any_scale(2**16)
    for copies in (messages, messages.expand(2, -1, -1).contiguous()):
        check(unpack(copies, layout, dtype=dtype))
        check(unpack(copies, layout, dtype=dtype, factor=1e-30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", WORST)
def test_what_is_not_finite_poisons_its_block(value, dtype):
    layout = MessageLayout.for_values(1000, 2, block=64)
    x = gradients(1, 1000, dtype)
    x[0, 700] = value
    messages = check(pack(x, layout)).messages.data
    assert layout.scales(messages).isnan().nonzero().tolist() == [[1, 2]]  # 700 = 512 + 188
    found = check(unpack(messages[None], layout, dtype=dtype)).x
    assert found.isnan().nonzero().flatten().tolist() == list(range(640, 704))
    total = check(add_up(messages, layout)).sum.data
    assert MessageLayout.of_shard(512, block=64).scales(total).isnan().nonzero().tolist() == [[2]]


def test_a_sum_that_overflows_is_not_finite():
    layout = MessageLayout.for_values(64, 1, block=32)
    x = torch.full((1, 64), 3e38)
    x[0, 32:] = 1.0
    messages = check(pack(x, layout)).messages.data
    total = check(add_up(messages.expand(2, -1).contiguous(), layout)).sum.data
    assert layout.scales(total).isnan().tolist() == [True, False]
    made = check(pack(x.expand(2, -1).contiguous(), layout))
    assert layout.scales(made.messages.data).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-40, 9e-36])
def test_vanishing_blocks_become_zero(largest):
    layout = MessageLayout.for_values(96, 1, block=32)
    x = torch.randn(1, 96)
    x[0, 32:64] = largest * torch.linspace(-1, 1, 32)
    messages = check(pack(x, layout)).messages.data
    assert not layout.codes(messages)[0, 32:64].any() and layout.scales(messages)[0, 1] == 0
    check(add_up(messages, layout))


@pytest.mark.parametrize("largest", [1.1e-35, 3.4e38])
def test_the_ends_of_the_range(largest):
    layout = MessageLayout.for_values(64, 1)
    messages = check(pack(largest * torch.linspace(-1, 1, 64)[None], layout)).messages.data
    assert layout.scales(messages).isfinite().all()
    check(add_up(messages, layout))


def test_ties_go_to_even_codes():
    layout = MessageLayout.for_values(256, 1, block=256)
    x = torch.cat([torch.arange(-126.5, 127.0), torch.tensor([127.0, 0.0])])[None]
    messages = check(pack(x, layout)).messages.data
    assert layout.codes(messages)[0, :5].tolist() == [-126, -126, -124, -124, -122]


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


def test_rows_and_copies_are_added_up():
    layout = MessageLayout.for_values(1000, 2)
    x = torch.randn(3, 1000)
    messages = on_cpu(pack(x, layout)).messages.data
    assert torch.equal(messages, on_cpu(pack((x[0] + x[1] + x[2])[None], layout)).messages.data)
    once, twice = (on_cpu(unpack(torch.stack([messages] * count), layout)).x for count in (1, 2))
    assert torch.equal(twice, 2 * once)


LAYOUT = MessageLayout.for_values(1000, 2)
MESSAGES = torch.zeros(2, LAYOUT.message_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    "made, said",
    [
        (
            lambda: pack(torch.zeros(1000), LAYOUT),
            r"\[1000\]; the layout wants \[at least one row, 1000\]",
        ),
        (lambda: pack(torch.zeros(1, 999), LAYOUT), r"pack are torch.float32 \[1, 999\]"),
        (
            lambda: pack(torch.zeros(0, 1000), LAYOUT),
            r"\[0, 1000\]; the layout wants \[at least one",
        ),
        (lambda: pack(torch.zeros(1, 1000).double(), LAYOUT), "pack are torch.float64"),
        (
            lambda: PackGradients(x=torch.zeros(1, 1000), messages=to_write(LAYOUT)),
            r"messages are torch.uint8 \[528\]",
        ),
        (
            lambda: add_up(torch.zeros(2, 48, dtype=torch.uint8), LAYOUT),
            r"\[2, 48\]; the layout wants",
        ),
        (lambda: add_up(MESSAGES.float(), LAYOUT), "add up are torch.float32"),
        (
            lambda: SumMessages(
                messages=Messages(layout=LAYOUT, data=MESSAGES),
                sum=to_write(MessageLayout.of_shard(512, block=32)),
            ),
            "give both the same layout",
        ),
        (lambda: unpack(MESSAGES, LAYOUT), r"\[2, 528\]; the layout wants \[at least one copy, 2"),
        (
            lambda: UnpackGradients(
                messages=Messages(layout=LAYOUT, data=MESSAGES[None]), x=empty(999)
            ),
            r"\[999\]",
        ),
        (lambda: unpack(MESSAGES[None], LAYOUT, dtype=torch.int32), "values are torch.int32"),
        (
            lambda: on_cpu(pack(torch.zeros(1000, 1).t().expand(2, -1), LAYOUT)),
            "must be a contiguous tensor",
        ),
    ],
)
def test_what_is_refused(made, said):
    with pytest.raises(ValueError, match=said):
        made()
