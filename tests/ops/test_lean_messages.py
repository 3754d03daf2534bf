"""Messages of the codec `lean`: a decoder and an encoder written down again from the definition, in
float64; loops of every level against references, bit by bit."""

import math

import numpy
import pytest
import torch

from lsq.ops.lean_messages import (
    LeanLayout,
    LeanMessages,
    PackLean,
    SumLean,
    UnpackLean,
)
from tests.native.levels import LEVELS, library_of
from tests.ops.compare import empty, on_cpu, on_reference, refused
from tests.ops.cuda import DTYPES
from tests.ops.gradient_checks import assert_same_bits, assert_same_tensor, gradients

BITS = (2, 4, 5, 5.5, 8.25)
SIZES = [(1, 1), (31, 1), (33, 2), (1000, 3), (70, 8), (4097, 1)]


def to_write(layout: LeanLayout, *copies: int) -> LeanMessages:
    data = empty(*copies, layout.message_bytes, dtype=torch.uint8)
    return LeanMessages(layout=layout, data=data)


def pack(x: torch.Tensor, layout: LeanLayout) -> PackLean:
    return PackLean(x=x, messages=to_write(layout, layout.shards))


def unpack(
    data: torch.Tensor, layout: LeanLayout, *, factor: float = 1.0, dtype=torch.float32
) -> UnpackLean:
    """The values of messages [R, S, M]."""
    x = empty(layout.values, dtype=dtype)
    return UnpackLean(messages=LeanMessages(layout=layout, data=data), factor=factor, x=x)


def add_up(data: torch.Tensor, layout: LeanLayout, bits: float, *, factor: float = 1.0) -> SumLean:
    """The sum of messages [N, M] of one shard."""
    out = LeanLayout.for_values(layout.length, 1, bits=bits)
    given = LeanMessages(layout=layout, data=data)
    return SumLean(messages=given, factor=factor, sum=to_write(out))


def check(operation):
    """Compare the loops of every level with the reference, bit by bit; what all made."""
    expected = on_reference(operation)
    for level in LEVELS:
        with library_of(level):
            assert_same_bits(on_cpu(operation), expected)
    return expected


class Decoded:
    """One message, read in float64 from its bytes."""

    def __init__(self, message: torch.Tensor, layout: LeanLayout):
        raw, blocks = message.numpy().tobytes(), layout.length // 32
        room = math.floor((layout.bits - 0.25) * 32 * blocks / 32)
        end = 4 * room + 2 + blocks
        assert len(raw) == layout.message_bytes == end + -end % 16 and not any(raw[end:])
        self.top = int.from_bytes(raw[4 * room : 4 * room + 2], "little")
        self.scales = list(raw[4 * room + 2 : end])
        self.widths = self.allocated(room)
        planes = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, 4 * room, 4)]
        assert not any(planes[sum(self.widths) :])
        self.codes, self.m = [], []
        for scale, width in zip(self.scales, self.widths, strict=True):
            mine, planes = planes[:width], planes[width:]
            self.codes.append(
                [sum((plane >> i & 1) << p for p, plane in enumerate(mine)) for i in range(32)]
            )
            self.m.append(2.0 ** ((self.top - 254 + scale) / 8 - 127))

    def allocated(self, room: int) -> list[int]:
        def width(scale: int, level: int) -> int:
            if scale in (0, 255) or scale + level < 0:
                return 0
            return min(max((scale + level) // 16, 3), 8)

        level = 128
        while sum(width(scale, level) for scale in self.scales) > room:
            level -= 1
        widths = [width(scale, level) for scale in self.scales]
        spare = room - sum(widths)
        for block, scale in enumerate(self.scales):
            spare -= width(scale, level + 1) - widths[block]
            if spare < 0:
                break
            widths[block] = width(scale, level + 1)
        return widths

    def values(self) -> numpy.ndarray:
        found = []
        blocks = zip(self.scales, self.widths, self.codes, self.m, strict=True)
        for scale, width, codes, m in blocks:
            if scale == 255:
                found += [math.nan] * 32
                continue
            half = 2 ** (width - 1) if width else 1
            sizes = [code % half / max(half - 1, 1) for code in codes]
            signs = [-1 if code >= half else 1 for code in codes]
            found += [sign * size ** (4 / 3) * m for sign, size in zip(signs, sizes, strict=True)]
        return numpy.array(found)


def assert_is_message_of(x: numpy.ndarray, message: torch.Tensor, layout: LeanLayout) -> None:
    """Every scale is the least that covers its block, every code the nearest."""
    decoded = Decoded(message, layout)
    for block, (scale, width) in enumerate(zip(decoded.scales, decoded.widths, strict=True)):
        part = x[32 * block : 32 * block + 32].astype(numpy.float64)
        largest, m = numpy.abs(part).max(), decoded.m[block]
        if not largest <= 2.0**127:
            assert scale == 255
            continue
        if scale == 0:
            least = 2.0 ** ((decoded.top - 254) / 8 - 127)
            assert largest <= least * (1 + 1e-6) or largest < 1e-35
            continue
        assert m * 2 ** (-1 / 8) * (1 - 1e-6) < largest <= m * (1 + 1e-6)
        if width:
            half = 2 ** (width - 1)
            wanted = (half - 1) * (numpy.abs(part) / m) ** 0.75
            codes = numpy.array(decoded.codes[block])
            assert numpy.abs(codes % half - wanted).max() < 0.5 + 1e-4
            assert ((codes >= half) == numpy.signbit(part)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("values, shards", SIZES)
def test_references_against_float64(values, shards, bits):
    layout = LeanLayout.for_values(values, shards, bits=bits)
    x = gradients(2, values)
    if values > 500:
        x[1, 300], x[:, 352:384], x[:, 400:450], x[0, 700] = math.inf, 0, 1e-36, math.nan
    messages = on_reference(pack(x, layout)).messages.data
    whole = numpy.zeros(shards * layout.length, numpy.float32)
    whole[:values] = (x[0] + x[1]).numpy()
    for part, message in zip(whole.reshape(shards, -1), messages, strict=True):
        assert_is_message_of(part, message, layout)
    expected = numpy.concatenate([Decoded(message, layout).values() for message in messages])
    for copies in (1, 2):
        back = on_reference(unpack(torch.stack([messages] * copies), layout, factor=0.3)).x
        wanted = torch.from_numpy(expected[:values] * copies * 0.3)
        torch.testing.assert_close(back.double(), wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_a_sum_against_float64():
    layout = LeanLayout.for_values(1000, 1, bits=4)
    data = torch.cat(
        [on_reference(pack(gradients(1, 1000), layout)).messages.data for _ in "12345"]
    )
    total = sum(Decoded(message, layout).values() for message in data) * 0.2
    found = on_reference(add_up(data, layout, 5, factor=0.2)).sum
    assert_is_message_of(total, found.data, found.layout)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values, shards", SIZES)
def test_pack_and_unpack(values, shards, dtype, rows):
    layout = LeanLayout.for_values(values, shards, bits=4)
    messages = check(pack(gradients(rows, values, dtype), layout)).messages.data
    check(unpack(messages[None], layout, dtype=dtype))
    check(unpack(messages.expand(3, -1, -1).contiguous(), layout, dtype=dtype, factor=0.7))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_sum(count, bits):
    layout = LeanLayout.for_values(1000, 1, bits=bits)
    data = torch.cat([on_cpu(pack(gradients(1, 1000), layout)).messages.data for _ in range(count)])
    check(add_up(data, layout, 5.5, factor=1 / count))


def test_any_bytes_are_read_as_the_reference_reads_them():
    """Scales and planes of a message may be anything; tops are some that messages have."""
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        layout = LeanLayout.for_values(2000, 1, bits=BITS[seed % len(BITS)])
        data = torch.randint(
            0, 256, (1, 1, layout.message_bytes), dtype=torch.uint8, generator=draw
        )
        data[..., 4 * layout.planes + 1] = 3  # a top from 768 to 1023
        check(unpack(data, layout))


def test_random_blocks_of_every_size():
    """Magnitudes over the whole range of float32, zeros, NaN and infinity."""
    draw = numpy.random.default_rng(1)
    for _ in range(15):
        values, bits = int(draw.integers(1, 700)), draw.integers(8, 34) / 4
        x = (
            draw.standard_normal(values)
            * 10.0 ** draw.uniform(-44, 38.3, values // 32 + 1).repeat(32)[:values]
        )
        x[draw.random(values) < draw.choice([0, 0.01, 0.9])] = draw.choice([0, math.nan, -math.inf])
        with numpy.errstate(over="ignore"):
            x = torch.from_numpy(x.astype(numpy.float32))[None]
        layout = LeanLayout.for_values(values, int(draw.integers(1, 4)), bits=bits)
        messages = check(pack(x, layout)).messages.data
        whole = numpy.zeros(layout.shards * layout.length, numpy.float32)
        whole[:values] = x[0].numpy()
        for part, message in zip(whole.reshape(layout.shards, -1), messages, strict=True):
            assert_is_message_of(part, message, layout)
        check(unpack(messages[None], layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e38])
def test_what_is_not_finite_poisons_its_block(value, dtype):
    layout = LeanLayout.for_values(3000, 2, bits=4)
    x = gradients(1, 3000, dtype)
    x[0, 700] = value
    messages = check(pack(x, layout)).messages.data
    found = check(unpack(messages[None], layout, dtype=dtype)).x.isnan().nonzero().flatten()
    assert found.tolist() == list(range(672, 704))
    total = check(add_up(messages, LeanLayout.for_values(layout.length, 1, bits=4), 5)).sum
    assert total.decode().isnan().nonzero().flatten().tolist() == list(range(672, 704))


def test_a_sum_that_overflows_is_not_finite():
    layout = LeanLayout.for_values(64, 1, bits=4)
    x = torch.full((1, 64), 1.5e38)
    x[0, 32:] = 1.0
    messages = check(pack(x, layout)).messages.data
    total = check(add_up(messages.expand(3, -1).contiguous(), layout, 4)).sum
    assert total.decode().isnan().tolist() == [True] * 32 + [False] * 32


@pytest.mark.parametrize("exponent", [-116, -100, -1, 0, 1, 126])
@pytest.mark.parametrize("eighth", range(8))
def test_numbers_of_the_grid_are_exact(exponent, eighth):
    """The largest magnitude of a block is kept if it lies on the grid; its neighbour is not."""
    m = numpy.float32(2.0 ** (exponent + eighth / 8))
    layout = LeanLayout.for_values(32, 1, bits=8.25)
    for largest in (m, numpy.nextafter(m, numpy.float32(0)), numpy.nextafter(m, m * 2)):
        x = torch.zeros(1, 32)
        x[0, 3] = -float(largest)
        messages = check(pack(x, layout)).messages.data
        assert_is_message_of(x[0].numpy(), messages[0], layout)
    assert check(unpack(on_cpu(pack(-x.sign() * float(m), layout)).messages.data[None], layout)).x[
        3
    ] == float(m)


def test_blocks_of_less_energy_get_fewer_bits_by_half_of_its_octaves():
    """Sixteen octaves of energy apart, four bits apart."""
    layout = LeanLayout.for_values(64, 1, bits=5.25)
    x = torch.full((1, 64), 1.0)
    x[0, 32:] = 2.0**-8
    decoded = Decoded(on_cpu(pack(x, layout)).messages.data[0], layout)
    assert decoded.widths == [7, 3]


def test_equal_blocks_share_what_there_is():
    layout = LeanLayout.for_values(128, 1, bits=4)
    decoded = Decoded(on_cpu(pack(torch.ones(1, 128), layout)).messages.data[0], layout)
    assert decoded.widths == [4, 4, 4, 3]


def test_zeros_are_zeros():
    layout = LeanLayout.for_values(100, 3, bits=4)
    messages = check(pack(torch.zeros(1, 100), layout)).messages.data
    assert not messages.any() and not check(unpack(messages[None], layout)).x.any()


def test_zeros_stay_zeros_beside_values_near_the_least():
    """Below the tops of these messages the grid has no numbers for blocks that vanish."""
    layout = LeanLayout.for_values(64, 1, bits=4)
    for top in (88, 100, 246, 250, 253, 254):
        x = torch.zeros(1, 64)
        x[0, 3] = 2.0 ** (top / 8 - 127)
        messages = check(pack(x, layout)).messages.data
        found = check(unpack(messages[None], layout)).x
        assert found[3] > 0 and not found[4:].any()


@pytest.mark.parametrize("bits, bound", [((4, 5), 6e-3), ((5, 5.5), 2e-3)])
def test_two_hops_of_eight_workers_are_close_to_the_mean(bits, bound):
    world, n = 8, 20_000
    x = torch.randn(world, n) * torch.randn(-(-n // 32)).exp().repeat_interleave(32)[:n]
    first = LeanLayout.for_values(n, world, bits=bits[0])
    one = LeanLayout.for_values(first.length, 1, bits=bits[0])
    sent = torch.stack([on_cpu(pack(row[None], first)).messages.data for row in x])
    shards = [sent[:, shard].contiguous() for shard in range(world)]
    sums = [on_cpu(add_up(shard, one, bits[1], factor=1 / world)).sum.data for shard in shards]
    second = LeanLayout.for_values(n, world, bits=bits[1])
    found, mean = on_cpu(unpack(torch.stack(sums)[None], second)).x, x.mean(0)
    assert 0 < (found - mean).square().sum() / mean.square().sum() < bound


def test_sizes():
    assert [LeanLayout.for_values(3200, 1, bits=bits).planes for bits in BITS] == [
        175, 375, 475, 525, 800,
    ]  # fmt: skip
    layout = LeanLayout.for_values(2**20, 8, bits=4)
    assert layout.message_bytes == pytest.approx(2**20 / 16, rel=1e-3)


LAYOUT = LeanLayout.for_values(1000, 2, bits=4)
MESSAGES = torch.zeros(2, LAYOUT.message_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda: LeanLayout.for_values(9, 1, bits=1.5), "1.5 bits a value .* 2 to 8.25"),
        (lambda: LeanLayout.for_values(9, 1, bits=4.1), "4.1 bits a value .* in quarters"),
        (lambda: LeanLayout.for_values(9, 1, bits=9), "9 bits a value"),
        (lambda: LeanLayout.for_values(9, 1, bits=4, block=64), "in blocks of 64; .* blocks of 32"),
        (lambda: LeanLayout.for_values(0, 1, bits=4), "do not hold 0 values"),
        (lambda: pack(torch.zeros(1, 999), LAYOUT), r"pack are \[1, 999\]"),
        (lambda: pack(torch.zeros(0, 1000), LAYOUT), r"\[0, 1000\]; the layout wants \[at least"),
        (lambda: add_up(MESSAGES[:, :48], LAYOUT, 5), r"\[2, 48\]; the layout wants"),
        (
            lambda: SumLean(
                messages=LeanMessages(layout=LAYOUT, data=MESSAGES),
                sum=to_write(LeanLayout.for_values(512, 2, bits=4)),
            ),
            "shards of 512 values in blocks of 32, their sum 256 in blocks of 32; give",
        ),
        (lambda: unpack(MESSAGES, LAYOUT), r"; the layout wants \[at least one copy, 2"),
        (lambda: pack(torch.zeros(1, 1000), LAYOUT).cuda(), "PackLean has no CUDA implementation"),
    ],
)
def test_what_is_refused(made, said):
    with refused(said):
        made()


def test_references_hold_the_same_bits_in_any_order_of_shards():
    layout = LeanLayout.for_values(320, 5, bits=4)
    x = gradients(1, 320)
    together = on_cpu(pack(x, layout)).messages.data
    alone = LeanLayout.for_values(64, 1, bits=4)
    for number, part in enumerate(x.view(5, 64)):
        assert_same_tensor(on_cpu(pack(part[None], alone)).messages.data[0], together[number])
