"""The product with packed fields on CUDA: order in memory, exact sums, traffic, machine code."""

import struct

import pytest
import torch

from lsq.native import compiler
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.project_cuda import packed_tile, project_product
from lsq.program.values import Weight
from lsq.quant import Grain
from lsq.quant.stored import Fields
from tests.ops.compare import empty, on_cpu, refused, weight_format_of
from tests.ops.cuda import ORDERS, run
from tests.ops.test_product_kernels_cuda import objdump, rounded
from tests.ops.test_project import operands, rounded_project
from tests.ops.tiles import (
    TARGETS,
    assert_two_blocks_fit,
    assert_whole_sectors,
    launches,
    multiplications,
    traffic,
)
from tests.sampling import first

BITS = range(1, 8)
PARTS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1]}
"""Widths of the fields of a code, from its lowest bits on."""


def form_of(bits: int) -> Fields:
    return Fields(name=f"int{bits}/row", bits=bits, grain=Grain.ROW)


def extremes(bits: int) -> tuple[int, int]:
    """The codes farthest from 0; of two's complement the smallest one has no counterpart."""
    return (-1, 1) if bits == 1 else (-(1 << bits - 1), (1 << bits - 1) - 1)


def codes_of(bits: int, *shape: int) -> torch.Tensor:
    low, high = extremes(bits)
    codes = torch.randint(low, high + 1, shape, dtype=torch.int8)
    return codes if bits > 1 else torch.where(codes < 0, -1, 1).to(torch.int8)


def weight_of(codes: torch.Tensor, bits: int, scale: torch.Tensor) -> Weight:
    form = form_of(bits)
    return Weight(format=form, codes=form.store(codes), scale=scale)


@pytest.mark.parametrize("bits", BITS)
def test_words_are_the_fragments_of_tensor_cores(bits):
    """By NVIDIA's PTX ISA (mma.m16n8k32): with lane = 4 * group + part, byte i of b has column
    `group` and row part * 4 + i % 4 + 16 * (i / 4)."""
    columns, inner = 16, 256
    codes = codes_of(bits, columns, inner)
    fragments = 8 if bits % 2 else 4  # in a span, of four bytes
    span, packed = 16 * fragments, bytearray(columns * inner * bits // 8)
    for column in range(columns):
        for row in range(inner):
            code = int(codes[column, row])
            code = int(code < 0) if bits == 1 else code & (1 << bits) - 1
            fragment, part, byte = row % span // 16, row % 16 // 4, row % 4
            lane = 4 * (column % 8) + part
            vector = (column // 8 * (inner // span) + row // span) * fragments * bits // 8
            for width in PARTS[bits]:
                place = 8 // width
                at = (vector + fragment // place) * 128 + 4 * lane + byte
                packed[at] |= (code & (1 << width) - 1) << fragment % place * width
                code, vector = code >> width, vector + fragments * width // 8
    form = form_of(bits)
    stored = form.store(codes)
    assert bytes(stored.view(torch.uint8).flatten()) == packed
    assert stored.shape == (columns, inner // span, span * bits // 8)
    assert stored[0].numel() == form.stored_columns(inner)


@pytest.mark.parametrize("inner", [1, 16, 127, 208])
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_found_again(bits, inner):
    form, codes = form_of(bits), codes_of(bits, 32, inner)
    assert torch.equal(form.unpack(form.store(codes), inner), codes)
    assert form.packed and form.largest == max(1, 2 ** (bits - 1) - 1)
    if bits > 1:
        values, clip = torch.randn(32, inner), torch.ones(32)
        stored, scale = form.encode(values, clip)
        wanted = weight_format_of(bits).encode(values, clip)
        assert torch.equal(form.unpack(stored, inner), wanted[0]) and torch.equal(scale, wanted[1])


def sums(x: torch.Tensor, codes: torch.Tensor, bits: int, order: int = 0) -> torch.Tensor:
    given = operands(*x.shape, len(codes)) | {"bias": None}
    given["x"].coded.codes, given["x"].coded.scale = x, torch.ones(1)
    given["weight"] = weight_of(codes, bits, torch.ones(len(codes)))
    return run(Project(**given, out=empty(len(x), len(codes))), order=order).out


@pytest.mark.parametrize(
    "rows, inner, outputs",
    first([(33, 144, 48), (3, 80, 80), (5, 1168, 16), (1, 16, 16), (70, 336, 144)], 1, 2),
)
@pytest.mark.parametrize("bits", BITS)
def test_sums_are_exact(bits, rows, inner, outputs):
    x = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    codes = codes_of(bits, outputs, inner)
    for order in ORDERS:
        assert torch.equal(sums(x, codes, bits, order).long(), x.long() @ codes.long().t())


@pytest.mark.parametrize("bits", first([1, 4, 7, 2, 3, 5, 6], 3))
def test_the_largest_sums_are_exact(bits):
    inner, extreme = 4112, torch.tensor(extremes(bits), dtype=torch.int8)
    codes = extreme[:, None].repeat(8, inner)
    x = torch.tensor([127, -127, 127], dtype=torch.int8)[:, None].repeat(1, inner)
    x[2, ::2] = -127
    assert torch.equal(sums(x, codes, bits).long(), x.long() @ codes.long().t())


def compare_with_int8(bits: int, rows: int, inner: int, outputs: int, activation: Activation):
    codes, given = codes_of(bits, outputs, inner), operands(rows, inner, outputs)
    scale = given["weight"].scale * 127 / extremes(bits)[1]
    plain = Weight(format=weight_format_of(), codes=codes, scale=scale)
    each = (given | {"weight": weight} for weight in (plain, weight_of(codes, bits, scale)))
    wanted, operation = (rounded_project(rows, outputs, activation, **one) for one in each)
    wanted = on_cpu(wanted).rounded
    for order in ORDERS:
        found = run(operation, order=order).rounded
        for name in ("codes", "scale", "clipped"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("bits, rows", first([(2, 3), (3, 41), (4, 130)], 2))
@pytest.mark.parametrize("activation", first([Activation.gelu, Activation.none], 1))
def test_epilogues_are_those_of_int8(bits, rows, activation):
    compare_with_int8(bits, rows, 272, 144, activation)


def turns():
    """Three steps along K and more, all rows of a tile's quarter, by every height of tiles."""
    for bits, rows in ((3, 20), (4, 41), (2, 150)):
        compare_with_int8(bits, rows, 528, 144, Activation.gelu)


@objdump
@pytest.mark.parametrize("bits", first([3, 4, 7, 1, 2, 5, 6], 1, 2))
def test_bits_are_read_once_without_conflicts(bits):
    """A warp reads 128 bytes of a bit at once, up to 512; 32 rows share what is read."""
    rows, inner, outputs = 32, 512, 128
    weight = weight_of(codes_of(bits, outputs, inner), bits, torch.ones(outputs))
    (entry,) = launches(rounded(rows, inner, outputs, weight=weight), None)
    found, of = traffic(entry)
    read = of[id(weight.codes)].reads
    assert_whole_sectors(read, inner * outputs * bits // 8)
    assert read.bytes == weight.codes.numel()
    assert read.requests == outputs // 8 * inner // 128 * -(-bits // 4)
    assert found.shared_passes == found.shared_least
    assert multiplications(found, packed_tile(weight.format, rows, inner)) == rows * inner * outputs


def launch_of(bits: int, rows: int):
    """With an end that takes many registers."""
    weight = weight_of(codes_of(bits, 32, 48), bits, torch.ones(32))
    operation = rounded(7, 48, 32, Activation.gelu, 0.1, weight=weight)
    operation.rounded.started = True
    return project_product(operation, packed_tile(weight.format, rows, 48))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", first([7, 3, 2, 4, 1, 5, 6], 2, 0))
def test_two_blocks_fit_and_nothing_spills(bits, target):
    for rows in (32, 64, 65):
        assert_two_blocks_fit(launch_of(bits, rows), target)


OPCODES = {"IMMA": 0x37, "BAR": 0x11D, "LOP3": 0x12, "SHF": 0x19, "PRMT": 0x16}
"""The lowest nine bits of an instruction of 16 bytes, without the kinds of its operands."""
MOST = {1: 2.5, 2: 2.5, 3: 5.5, 4: 2.5, 5: 6, 6: 6, 7: 8.5}
"""Operations on bits for each multiplication of 16 rows, of addresses too; most shifts to the left
are IMAD."""


def opcodes(image: bytes) -> list[int]:
    """Of the one kernel in a cubin, an ELF file, in the order of its instructions."""
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", image, sections + size * i) for i in range(count)]
    for name, _, _, _, offset, length in heads:
        if image.startswith(b".text.", heads[names][4] + name):
            code = image[offset : offset + length]
            return [one & 0x1FF for (one, _, _) in struct.iter_unpack("<QII", code)]
    raise ValueError("a cubin without a kernel")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", first([7, 3, 4, 1, 2, 5, 6], 3, 0))
def test_operations_on_bits_for_a_multiplication(bits, target):
    """Of the main loop, from its barrier to its last multiplication."""
    kernel = launch_of(bits, 16).kernel
    found = opcodes(compiler.compile_kernels(kernel.source, kernel.defines, target).image)
    first = found.index(OPCODES["IMMA"])
    last = len(found) - found[::-1].index(OPCODES["IMMA"])
    begin = max(i for i in range(first) if found[i] == OPCODES["BAR"])
    counts = {name: found[begin:last].count(code) for name, code in OPCODES.items()}
    assert counts["IMMA"] == 16
    assert counts["LOP3"] + counts["SHF"] + counts["PRMT"] <= MOST[bits] * counts["IMMA"]


def test_what_the_kernel_does_not_take():
    weight = weight_of(codes_of(2, 24, 48), 2, torch.ones(24))
    with refused(r"weight.codes is \[32, 1, 16\]; it must be \[P, K\] or"):
        run(rounded(7, 48, 24, weight=weight))
    weight = weight_of(codes_of(2, 32, 40), 2, torch.ones(32))
    with refused("inner width of an int8 product is 40.*multiple of 16"):
        launches(rounded(7, 40, 32, weight=weight), None)
    with refused("stored as int2/row has 133200 inputs; on CUDA it may have .*: choose int8"):
        packed_tile(form_of(2), 1, 133200)
