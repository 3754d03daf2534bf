"""Stored types: whole numbers that stand for values, and the order of packed codes in memory."""

from fractions import Fraction

import pytest
import torch

from lsq.quant.layouts import CPU, CUDA, Hints, Layout
from lsq.quant.numbers import NUMBER_FORMATS
from lsq.quant.stored import (
    BYTES_SUMMED,
    WORD,
    WORDS_SUMMED,
    Decode,
    field_bytes,
    pack,
    stored_type,
    unpack,
)
from lsq.quant.tables import NumberFormat
from tests.ops.compare import refused


def form_of(*values: float) -> NumberFormat:
    return NumberFormat(name="mine", values=values)


def value_of_ranks(number: NumberFormat) -> list[Fraction]:
    """Exact, by the stored code of each rank."""
    stored = stored_type(number)
    count = len({value for value in number.values if abs(value) < float("inf")})
    codes = stored.stored(torch.arange(count, dtype=torch.uint8))
    return [Fraction(stored.unit) * int(one) for one in stored.whole_values(codes)]


@pytest.mark.parametrize("name", sorted(NUMBER_FORMATS))
def test_stored_codes_stand_for_the_values(name):
    number = NUMBER_FORMATS[name]()
    wanted = sorted({Fraction(one) for one in number.values if abs(one) < float("inf")})
    stored = stored_type(number)
    assert 2**stored.bits >= len(wanted) > 2 ** (stored.bits - 1) or stored.bits == 8
    if not stored.whole:
        assert stored.bits > 4
        return
    found = value_of_ranks(number)
    if stored.decode is Decode.WORDS:  # half a step of a 16-bit number, and float rounding
        allowed = Fraction(number.largest) / WORD / 2 * (1 + Fraction(1, 2**20))
        assert all(abs(a - b) <= allowed for a, b in zip(found, wanted, strict=True))
    else:
        rest = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        assert max(rest) <= Fraction(number.largest) / 2**50


@pytest.mark.parametrize(
    ("values", "bits", "decode", "step", "zero"),
    [
        ((0.0, 1.0), 1, Decode.AFFINE, 1, 0),
        ((-0.3, 0.3), 1, Decode.AFFINE, 2, 1),
        ((-3.0, -1.0, 1.0, 3.0), 2, Decode.AFFINE, 2, 3),
        ((-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0), 3, Decode.BYTES, 1, 4),
        ((0.1, 0.3, 1.0), 2, Decode.WORDS, 1, 2**15),
        (tuple(float(i * i) for i in range(16)), 4, Decode.BYTES, 1, 0),
        (tuple(map(float, range(100))), 7, Decode.AFFINE, 1, 0),
        (tuple(float(i * (i > 9) + i) for i in range(20)), 8, Decode.AFFINE, 1, 0),
        (tuple(1.5**i for i in range(20)), 5, Decode.FLOATS, 1, 0),
    ],
)
def test_the_kind_follows_from_the_values(values, bits, decode, step, zero):
    found = stored_type(form_of(*values))
    assert (found.bits, found.decode, found.step, found.zero) == (bits, decode, step, zero)


def test_odd_widths_fill_spans():
    assert [stored_type(NUMBER_FORMATS["int3"]()).bits_in(group) for group in (16, 32, 48)] == [
        4,
        3,
        4,
    ]


@pytest.mark.parametrize(
    ("bits", "inner", "input_", "expected"),
    [
        # (offset, byte) of each field of the code 2^bits - 1 of output 3, 16 outputs to a vector
        (1, 32, 0, {12: 0b1}),
        (1, 32, 5, {13: 0b10}),
        (1, 32, 31, {15: 0b10000000}),
        (1, 64, 33, {64 + 13: 0b1}),
        (2, 16, 0, {12: 0b11}),
        (2, 16, 7, {15: 0b1100}),
        (2, 32, 16, {64 + 12: 0b11}),
        (3, 32, 0, {12: 0b11, 128 + 12: 0b1}),
        (3, 32, 18, {64 + 14: 0b11, 128 + 14: 0b10000}),
        (4, 16, 4, {12: 0b11110000}),
        (4, 16, 9, {64 + 13: 0b1111}),
        (6, 16, 12, {64 + 12: 0b11110000, 128 + 12: 0b11000000}),
        (7, 32, 8, {64 + 12: 0b1111, 256 + 12: 0b110000, 384 + 12: 0b100}),
        (8, 16, 6, {64 + 14: 0b11111111}),
    ],
)
def test_bytes_on_a_cpu(bits, inner, input_, expected):
    """Written out by hand: fields of 4 bits first, then of 2, then of 1."""
    codes = torch.zeros(32, inner, dtype=torch.uint8)
    codes[3, input_] = 2**bits - 1
    packed = pack(CPU, codes, bits)
    assert packed.numel() == 32 * inner * bits // 8
    assert {int(i): int(packed[i]) for i in packed.nonzero()} == expected


@pytest.mark.parametrize("layout", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_comes_back(layout, bits):
    torch.manual_seed(bits)
    for shape in ((1, 1), (33, 67), (16, 256), (50, 130)):
        codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
        codes.view(-1)[: 2**bits] = torch.arange(2**bits, dtype=torch.uint8)[: codes.numel()]
        packed = pack(layout, codes, bits)
        assert packed.numel() == layout.packed_bytes(bits, *shape)
        assert torch.equal(unpack(layout, packed, bits, shape), codes)


def test_layouts_follow_from_hints():
    assert (CPU.lanes, CPU.vector, CPU.pad) == ((16, 1), 64, (32, 64))
    assert (CUDA.lanes, CUDA.unit_inputs, CUDA.vector) == ((8, 4), 16, 128)
    wide = Hints(multiplications=((4, 4), (6, 8)), lane_inputs=1, line=128, together=1)
    assert Layout.of(wide) == Layout(lanes=(96, 1), pad=(96, 32))


@pytest.mark.parametrize(
    ("name", "inner", "group", "message"),
    [
        ("int4", BYTES_SUMMED + 1, 0, f"hold {BYTES_SUMMED}"),
        ("nf4", WORDS_SUMMED + 1, 0, f"hold {WORDS_SUMMED}"),
        ("nf4", 4096, 512, f"hold {WORDS_SUMMED}"),
        ("fp8-e4m3", 64, 0, "8 bits whose values are not whole has no integer product"),
    ],
)
def test_sums_beyond_32_bits_are_refused(name, inner, group, message):
    with refused(message):
        field_bytes((8, inner), stored_type(NUMBER_FORMATS[name]()), group, 1)


def test_bounds_of_sums():
    """The largest products that fit, and one more."""
    for most, largest in ((BYTES_SUMMED, 255), (WORDS_SUMMED, 65535)):
        assert most * largest * 128 < 2**31
    assert (BYTES_SUMMED + 1) * 255 * 128 >= 2**31
