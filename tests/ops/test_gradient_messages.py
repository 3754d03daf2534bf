"""PackGradients, SumMessages and UnpackGradients: the references against numpy, value by value, and
the CPU's loops against the references, bit by bit.
"""

import math

import numpy
import pytest
import torch

from lsq.ops.gradient_layout import BLOCKS, MessageLayout
from lsq.ops.gradient_messages import Messages, PackGradients, SumMessages, UnpackGradients
from lsq.quant import random
from tests.ops.compare import KEY, empty, on_cpu, on_reference, refused
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


def numpy_block(x: numpy.ndarray, largest_code: int, uniform: numpy.ndarray | None):
    """(codes, scale, error) of one block float32, written down again from the definition."""
    largest = numpy.float32(numpy.abs(x).max())
    if not numpy.isfinite(x).all():
        return (
            numpy.zeros(len(x), numpy.int8),
            numpy.float32(numpy.nan),
            numpy.zeros(len(x), numpy.float32),
        )
    if largest < numpy.float32(1e-35):
        return numpy.zeros(len(x), numpy.int8), numpy.float32(0), x
    # a bfloat16's, rounded up
    bits = -(-(largest / numpy.float32(largest_code)).view(numpy.uint32).item() // 65536)
    scale = numpy.uint32(65536 * bits).view(numpy.float32)
    reciprocal = numpy.float32(1) / scale
    codes = numpy.rint(x * reciprocal) if uniform is None else numpy.floor(x * reciprocal + uniform)
    codes = codes.clip(-largest_code, largest_code).astype(numpy.int8)
    return codes, scale, x - codes.astype(numpy.float32) * scale


def numpy_message(x: numpy.ndarray, layout: MessageLayout, uniform: numpy.ndarray | None):
    """(message, error) of one shard float32 [L]."""
    starts = range(0, layout.length, layout.block)
    cut = [slice(start, min(start + layout.block, layout.length)) for start in starts]
    blocks = [
        numpy_block(x[s], layout.largest_code, None if uniform is None else uniform[s]) for s in cut
    ]
    codes = numpy.concatenate([block[0] for block in blocks])
    if layout.bits == 4:
        nibbles = codes.astype(numpy.int64) % 16
        codes = (nibbles[0::2] + 16 * nibbles[1::2]).astype(numpy.uint8)
    written = codes.tobytes() + b"".join(block[1].tobytes()[2:] for block in blocks)
    padded = written + bytes(-len(written) % 16)
    return numpy.frombuffer(padded, numpy.uint8).copy(), numpy.concatenate(
        [block[2] for block in blocks]
    )


def numpy_values(message: numpy.ndarray, layout: MessageLayout) -> numpy.ndarray:
    """Float32 [L] of one message."""
    raw = message.tobytes()
    codes = numpy.frombuffer(raw[: layout.code_bytes], numpy.int8)
    if layout.bits == 4:
        halves = [
            [(byte + 8) % 16 - 8, ((byte >> 4) + 8) % 16 - 8]
            for byte in codes.astype(numpy.int64) % 256
        ]
        codes = numpy.array(halves).flatten()
    halves = numpy.frombuffer(
        raw[layout.code_bytes : layout.code_bytes + 2 * layout.blocks], numpy.uint16
    )
    scales = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
    return codes.astype(numpy.float32) * numpy.repeat(scales, layout.block)[: layout.length]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "values, shards, block", [(1, 1, 256), (1, 3, 32), (333, 1, 64), (1000, 3, 256), (70, 8, 32)]
)
def test_references_against_numpy(values, shards, block, bits, stochastic):
    layout = MessageLayout.for_values(values, shards, block=block, bits=bits)
    x = gradients(2, values)
    if values > 500:
        x[1, 300], x[:, 352:608] = math.inf, 1e-36
    found = on_reference(pack(x, layout, stochastic=stochastic, subsequence=3, error=True))
    whole = numpy.zeros(shards * layout.length, numpy.float32)
    whole[:values] = (x[0] + x[1]).numpy()
    uniform = (
        random.uniform(KEY, 3, (shards, layout.length)).numpy() if stochastic else [None] * shards
    )
    made = [
        numpy_message(part, layout, u)
        for part, u in zip(whole.reshape(shards, -1), uniform, strict=True)
    ]
    messages = found.messages.data
    assert_same_tensor(messages, torch.from_numpy(numpy.stack([message for message, _ in made])))
    assert_same_tensor(
        found.error, torch.from_numpy(numpy.concatenate([rest for _, rest in made])[:values])
    )
    back = on_reference(unpack(messages[None], layout, factor=0.3)).x
    expected = numpy.concatenate([numpy_values(message, layout) for message, _ in made])[
        :values
    ] * numpy.float32(0.3)
    assert_same_tensor(back, torch.from_numpy(expected))


@pytest.mark.parametrize("bits, out_bits", [(8, 8), (4, 8), (4, 4)])
def test_a_sum_against_numpy(bits, out_bits):
    layout, messages = packed(1000, 5, bits=bits)
    messages = messages[:, 0]
    total = numpy_values(messages[0].numpy(), layout)
    for message in messages[1:]:
        total = total + numpy_values(message.numpy(), layout)
    out_layout = MessageLayout.of_shard(layout.length, bits=out_bits)
    expected, _ = numpy_message(total * numpy.float32(0.2), out_layout, None)
    found = on_reference(add_up(messages, layout, out_bits=out_bits, factor=0.2)).sum.data
    assert_same_tensor(found, torch.from_numpy(expected))


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3), (4097, 2)])
def test_pack(values, shards, bits, dtype, rows):
    layout = MessageLayout.for_values(values, shards, bits=bits)
    x = gradients(rows, values, dtype)
    error = check(pack(x, layout, error=True)).error
    check(pack(x, layout, error=True, stochastic=True, subsequence=5))
    check(pack(x, layout))
    assert error.abs().max() <= x.float().sum(0).abs().max() / layout.largest_code


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, bits):
    layout = MessageLayout.for_values(5000, 2, block=block, bits=bits)
    for stochastic in (False, True):
        made = check(
            pack(gradients(1, 5000), layout, error=True, stochastic=stochastic)
        ).messages.data
        for out_bits in (8, 4):
            check(add_up(made, layout, out_bits=out_bits, stochastic=stochastic))
        check(unpack(made[None], layout))


@pytest.mark.parametrize("count", range(1, 10))
def test_sum(count):
    for bits in (8, 4):
        layout, messages = packed(1000, count, bits=bits)
        of_one = messages[:, 0].contiguous()
        check(add_up(of_one, layout, factor=1 / count))
        check(add_up(of_one, layout, factor=1 / count, stochastic=True, subsequence=2))


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", [(1, 1), (9, 8), (333, 2), (1000, 3)])
def test_unpack(values, shards, dtype, copies):
    for bits in (8, 4):
        layout, messages = packed(values, copies, shards=shards, bits=bits)
        check(unpack(messages, layout, factor=0.7, dtype=dtype))
        check(unpack(messages, layout, factor=1e6, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_half_is_widened(dtype):
    check(pack(every_half(dtype), MessageLayout.for_values(2**16, 1, block=32), error=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_narrowed(dtype):
    layout, messages = any_scale(2**16)
    for copies in (messages, messages.expand(2, -1, -1).contiguous()):
        check(unpack(copies, layout, dtype=dtype))
        check(unpack(copies, layout, dtype=dtype, factor=1e-30))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", WORST)
def test_what_is_not_finite_poisons_its_block(value, dtype, bits):
    layout = MessageLayout.for_values(1000, 2, block=64, bits=bits)
    x = gradients(1, 1000, dtype)
    x[0, 700] = value
    for stochastic in (False, True):
        made = check(pack(x, layout, error=True, stochastic=stochastic))
        messages, error = made.messages.data, made.error
        assert layout.scales(messages).isnan().nonzero().tolist() == [[1, 2]]  # 700 = 512 + 188
        assert error.isfinite().all() and not error[640:704].any()
    found = check(unpack(messages[None], layout, dtype=dtype)).x
    assert found.isnan().nonzero().flatten().tolist() == list(range(640, 704))
    total = check(add_up(messages, layout, stochastic=True)).sum.data
    assert MessageLayout.of_shard(512, block=64).scales(total).isnan().nonzero().tolist() == [[2]]


def test_a_sum_that_overflows_is_not_finite():
    layout = MessageLayout.for_values(64, 1, block=32)
    x = torch.full((1, 64), 3e38)
    x[0, 32:] = 1.0
    messages = check(pack(x, layout)).messages.data
    total = check(add_up(messages.expand(2, -1).contiguous(), layout)).sum.data
    assert layout.scales(total).isnan().tolist() == [True, False]
    made = check(pack(x.expand(2, -1).contiguous(), layout, error=True))
    assert (
        layout.scales(made.messages.data).isnan().tolist() == [[True, False]]
        and not made.error[:32].any()
    )


@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-40, 9e-36])
def test_vanishing_blocks_become_zero(largest):
    layout = MessageLayout.for_values(96, 1, block=32)
    x = torch.randn(1, 96)
    x[0, 32:64] = largest * torch.linspace(-1, 1, 32)
    for stochastic in (False, True):
        made = check(pack(x, layout, error=True, stochastic=stochastic))
        messages = made.messages.data
        assert not layout.codes(messages)[0, 32:64].any() and layout.scales(messages)[0, 1] == 0
        assert torch.equal(made.error[32:64], x[0, 32:64])
        check(add_up(messages, layout, stochastic=stochastic))


@pytest.mark.parametrize("largest", [1.1e-35, 3.4e38])
def test_the_ends_of_the_range(largest):
    for bits in (8, 4):
        layout = MessageLayout.for_values(64, 1, bits=bits)
        messages = check(
            pack(largest * torch.linspace(-1, 1, 64)[None], layout, error=True)
        ).messages.data
        assert layout.scales(messages).isfinite().all()
        check(add_up(messages, layout))


def test_ties_go_to_even_codes():
    layout = MessageLayout.for_values(256, 1, block=256)
    x = torch.cat([torch.arange(-126.5, 127.0), torch.tensor([127.0, 0.0])])[None]
    messages = check(pack(x, layout)).messages.data
    assert layout.codes(messages)[0, :5].tolist() == [-126, -126, -124, -124, -122]


def test_rounding_at_random_has_no_bias():
    layout = MessageLayout.for_values(4096, 1, bits=4)
    x = torch.full((1, 4096), 0.3)
    x[0, ::128] = 7.0
    messages = check(pack(x, layout, stochastic=True)).messages.data
    up = check(unpack(messages[None], layout)).x.view(32, 128)[:, 1:]
    assert (
        set(up.unique().tolist()) == {0.0, 1.0}
        and abs(up.mean() - 0.3) < 5 * (0.21 / up.numel()) ** 0.5
    )


@pytest.mark.parametrize("run", [on_cpu, on_reference])
@pytest.mark.parametrize("values", [1000, 1001])
def test_the_error_may_take_the_place_of_the_values(values, run):
    """As error feedback wants it: what one step leaves, the next one adds its gradients to."""
    operation = pack(torch.randn(1, values), MessageLayout.for_values(values, 3), error=True)
    wanted = on_reference(operation)
    operation.error = operation.x.view(-1)
    found = run(operation)
    assert torch.equal(found.messages.data, wanted.messages.data) and torch.equal(
        operation.x[0], wanted.error
    )


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
            lambda: PackGradients(
                x=torch.zeros(1, 1000),
                messages=to_write(LAYOUT, 2),
                error=empty(1000, dtype=torch.bfloat16),
            ),
            "error are torch.bfloat16",
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
            "only the bits may differ",
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
    with refused(said):
        made()
