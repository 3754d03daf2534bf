"""Packed fields: exact sums of codes of every width, by every instruction and library."""

from fractions import Fraction

import pytest
import torch

from lsq.native import tiles
from lsq.ops.grouped_product import GroupedCodes
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.program.values import Coded
from lsq.quant.formats import Format, Grain
from lsq.quant.layouts import CPU
from lsq.quant.numbers import NUMBER_FORMATS
from lsq.quant.stored import BYTES_SUMMED, Decode, StoredType, pack, stored_type
from lsq.quant.tables import NumberFormat
from tests.native.levels import LEVELS, library_of
from tests.ops.compare import compare, on_cpu, refused, rounded

INT8 = Format(name="activation", bits=8, grain=Grain.TENSOR)
TYPES = {
    **{
        f"{bits} bits": StoredType(bits=bits, decode=Decode.AFFINE, zero=2 ** (bits - 1))
        for bits in range(1, 9)
    },
    "two values": stored_type(NumberFormat(name="two", values=(-0.3, 0.3))),
    "step 2": stored_type(NumberFormat(name="four", values=(-3.0, -1.0, 1.0, 3.0))),
    "bytes of 2": stored_type(NumberFormat(name="third", values=(-2.0, 0.0, 1.0, 3.0))),
    "bytes of 3": stored_type(NumberFormat(name="seven", values=(-4, -2, -1, 0, 1, 2, 4))),
    "fp4-e2m1": stored_type(NUMBER_FORMATS["fp4-e2m1"]()),
    "wide bytes": stored_type(NumberFormat(name="squares", values=tuple(i * i for i in range(16)))),
}
SHAPES = [(1, 1, 1), (2, 33, 100), (3, 64, 130), (4, 48, 64), (5, 97, 256)]
SHAPES += [(8, 32, 515), (17, 40, 600), (33, 64, 1100), (70, 16, 64)]
"""Rows, outputs, inputs."""


def codes_below(count: int, *shape: int) -> torch.Tensor:
    codes = torch.randint(0, count, shape, dtype=torch.uint8)
    codes.view(-1)[: codes.numel() // 3] = count - 1  # whole spans of the largest
    return codes


def count_of(stored: StoredType) -> int:
    """The number of codes that a type has."""
    return len(stored.table) or (255 // stored.step + 1 if stored.bits == 8 else 2**stored.bits)


def product(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    given = Coded(format=INT8, codes=x, scale=torch.ones(1))
    operation = PackedProject(x=given, weight=weight, out=torch.empty(len(x), weight.columns))
    return on_cpu(operation).out


def check_sums(stored: StoredType, rows: int, columns: int, inner: int, instructions=None) -> None:
    """In int64, of values that the formula gives; both become floats at the end."""
    torch.manual_seed(inner)
    codes = codes_below(count_of(stored), columns, inner)
    x = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    x[-1] = 127
    weight = PackedWeight.of_stored(
        codes, torch.full((columns,), 1 / stored.unit), stored, instructions=instructions
    )
    weight.scale = torch.ones(columns)
    table = stored.table or [stored.step * code for code in range(256)]
    whole = torch.tensor(table, dtype=torch.int64)[codes.int()] - stored.zero
    assert torch.equal(weight.codes().long(), whole)
    assert torch.equal(product(x, weight), (x.long() @ whole.t()).float())


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("name", TYPES)
def test_sums_are_exact(name, instructions):
    for shape in SHAPES:
        check_sums(TYPES[name], *shape, instructions)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["1 bits", "2 bits", "4 bits", "7 bits", "bytes of 3"])
def test_every_library_has_them(name, level):
    with library_of(level):
        for instructions in tiles.usable():
            for shape in SHAPES:
                check_sums(TYPES[name], *shape, instructions)


@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TYPES)
def test_any_shape_on_every_library(name, level):
    with library_of(level):
        for instructions in tiles.usable():
            for rows in range(1, 36):
                check_sums(TYPES[name], rows, 1 + rows * 7 % 70, 1 + rows * 37 % 600, instructions)


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_longest_sums(rows, instructions):
    """65,793 products of 255 and codes at both ends."""
    stored = StoredType(bits=8, decode=Decode.AFFINE)
    codes = torch.full((32, BYTES_SUMMED), 255, dtype=torch.uint8)
    weight = PackedWeight.of_stored(codes, torch.ones(32), stored, instructions=instructions)
    for code in (127, -128):
        x = torch.full((rows, BYTES_SUMMED), code, dtype=torch.int8)
        found = product(x, weight)
        assert (found == torch.tensor(255 * code * BYTES_SUMMED).float()).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_as_the_reference(bits):
    for shape in ((32, 64), (45, 100)):
        stored = StoredType(bits=bits, decode=Decode.AFFINE)
        codes = codes_below(2**bits, *shape)
        weight = PackedWeight.of_stored(codes, torch.ones(len(codes)), stored)
        assert torch.equal(weight.tiles, pack(CPU, codes, bits))


@pytest.mark.parametrize("instructions", tiles.usable())
@pytest.mark.parametrize("name", ["nf4", "lloyd3-gaussian", "lloyd2-laplacian", "log2.1"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_words_are_exact_whole_numbers(name, rows, instructions):
    """By fractions: a scale of a power of two leaves sums of groups of 256 whole."""
    stored = stored_type(NUMBER_FORMATS[name]())
    codes = codes_below(len(stored.table), 5, 256)
    x = torch.randint(-127, 128, (rows, 256), dtype=torch.int8)
    weight = PackedWeight.of_stored(codes, torch.ones(5), stored, instructions=instructions)
    weight.scale = torch.ones(5)
    found, numbers = product(x, weight), [Fraction(one - stored.zero) for one in stored.table]
    for row in range(rows):
        for output in range(5):
            pairs = zip(codes[output].tolist(), x[row].tolist(), strict=True)
            wanted = sum(numbers[code] * value for code, value in pairs)
            assert found[row, output] == torch.tensor(float(wanted)).item()


def test_memory_is_the_bits_and_the_scales():
    for bits in range(1, 9):
        for group, scales in ((0, 0), (64, 32)):
            stored = StoredType(bits=bits, decode=Decode.AFFINE)
            scale = torch.ones(96, max(scales, 1)) if scales else torch.ones(96)
            codes = torch.zeros(96, 2048, dtype=torch.uint8)
            weight = PackedWeight.of_stored(codes, scale, stored, group=group)
            assert weight.tiles.numel() == 96 * (2048 * bits // 8 + 4 * scales)


def test_scales_of_groups_are_read_back():
    stored, scale = TYPES["bytes of 3"], 0.5 + torch.rand(40, 3)
    codes = codes_below(7, 40, 80)
    weight = PackedWeight.of_stored(codes, scale, stored, group=32)
    given = GroupedCodes(codes=stored.whole_values(codes), scale=scale * stored.unit, group=32)
    assert torch.equal(weight.values(), given.decode())


def test_a_product_and_its_end_are_the_references():
    weight = PackedWeight.of_stored(codes_below(8, 48, 80), torch.rand(48), TYPES["3 bits"])
    x = rounded(7, 80).bare()
    compare(PackedProject(x=x, weight=weight, bias=torch.randn(48), out=torch.empty(7, 48)))


def test_what_cannot_be_packed():
    codes = torch.zeros(8, 64, dtype=torch.uint8)
    with refused("no integer product"):
        PackedWeight.of_stored(codes, torch.ones(8), stored_type(NUMBER_FORMATS["fp8-e4m3"]()))
    with refused("'none' cannot run here"):
        PackedWeight.of_stored(codes, torch.ones(8), TYPES["3 bits"], instructions="none")
    wide = torch.zeros(1, BYTES_SUMMED + 1, dtype=torch.uint8)
    with refused(f"which hold {BYTES_SUMMED}"):
        PackedWeight.of_stored(wide, torch.ones(1), TYPES["3 bits"])


@pytest.mark.parametrize(
    ("dtype", "scales", "group", "said"),
    [
        (torch.int32, (32,), 0, "codes are torch.int32"),
        (torch.uint8, (32, 8), 8, "groups of 8"),
        (torch.uint8, (32, 1), -16, "groups of -16"),
        (torch.uint8, (32, 2), 16, r"the shape \[32, 2\]"),
        (torch.uint8, (31,), 0, r"the shape \[31\]"),
    ],
)
def test_what_cannot_be_packed_is_named(dtype, scales, group, said):
    with refused(said):
        PackedWeight.of_stored(
            torch.zeros(32, 64, dtype=dtype), torch.ones(scales), TYPES["2 bits"], group=group
        )


@pytest.mark.parametrize(("scales", "group"), [((0,), 0), ((0, 4), 16)])
def test_weights_without_outputs_are_packed(scales, group):
    codes = torch.zeros(0, 64, dtype=torch.uint8)
    found = PackedWeight.of_stored(codes, torch.ones(scales), TYPES["2 bits"], group=group)
    assert found.codes().shape == (0, 64)
