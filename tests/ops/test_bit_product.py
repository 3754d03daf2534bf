"""Planes of bits: their layout, rounding, and products beside Python's whole numbers."""

import math

import numpy
import pytest
import torch

from lsq.bits.choice import counts_bits
from lsq.ops.bit_product import (
    BitMatrix,
    BitProduct,
    BitRounding,
    BitTiles,
    ByteProduct,
    RoundBits,
    UnpackBits,
    padded_shape,
)
from tests.native.levels import LEVELS, library_of
from tests.ops.compare import empty, on_cpu, refused
from tests.ops.cuda import compare_cuda
from tests.sampling import first

SHAPES = [(1, 1, 1), (3, 130, 5), (41, 300, 77), (9, 257, 24)]
"""Rows, inputs, columns."""


def drawn(shape, bits: int, signed: bool, seed: int = 0) -> numpy.ndarray:
    """Codes int64 with both extremes, of two's complement, too."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    codes = numpy.random.default_rng(seed).integers(low, high, shape)
    codes.flat[0], codes.flat[-1] = low, high - 1
    return codes


def matrix_of(codes: numpy.ndarray, bits: int, signed: bool, by_column: bool) -> BitMatrix:
    """Planes by numpy.packbits, of codes of rows and columns."""
    lines = codes.T if by_column else codes
    whole = numpy.zeros((-(-len(lines) // 8) * 8, -(-lines.shape[1] // 128) * 128), numpy.int64)
    whole[: len(lines), : lines.shape[1]] = lines
    planes = [
        numpy.packbits((whole >> i & 1).astype(bool), axis=1, bitorder="little")
        for i in range(bits)
    ]
    words = numpy.stack(planes).view(numpy.uint32)
    words = numpy.ascontiguousarray(words.swapaxes(1, 2) if by_column else words)
    planes = torch.from_numpy(words.view(numpy.uint8).copy())
    return BitMatrix(planes=planes, is_signed=signed, by_column=by_column)


def to_write(rows: int, columns: int, bits: int, by_column: bool) -> BitMatrix:
    lines = (columns, rows) if by_column else (rows, columns)
    planes = empty(*padded_shape(*lines, bits, by_column), dtype=torch.uint8)
    return BitMatrix(planes=planes, is_signed=bits > 1, by_column=by_column)


def product(a, b, *, a_bits, b_bits, signed=(True, True), popcounts=True, tiles=None, **end):
    """The product of codes int64 [M, K] and [K, N]."""
    return BitProduct(
        a=matrix_of(a, a_bits, signed[0], False),
        b=matrix_of(b, b_bits, signed[1], True),
        tiles=tiles,
        rows=a.shape[0],
        columns=b.shape[1],
        popcounts=popcounts,
        **end or {"sums": empty(a.shape[0], b.shape[1], dtype=torch.int32)},
    )


def rounding_of(step: float) -> BitRounding:
    return BitRounding(step=torch.tensor([step]))


def check_sums(rows, inner, columns, a_bits, b_bits, signed=(True, True), popcounts=True):
    a = drawn((rows, inner), a_bits, signed[0])
    b = drawn((inner, columns), b_bits, signed[1], seed=1)
    bits = {"a_bits": a_bits, "b_bits": b_bits}
    found = on_cpu(product(a, b, **bits, signed=signed, popcounts=popcounts))
    assert numpy.array_equal(found.sums.numpy(), a @ b)


def ways(level: str) -> list[bool]:
    return [False, True] if level == "v4" and counts_bits() else [False]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("a_bits", range(1, 9))
def test_sums_are_exact(level, a_bits):
    with library_of(level):
        for b_bits in range(1, 9):
            for signed in ((True, True), (True, False), (False, True), (False, False)):
                for popcounts in ways(level):
                    for shape in SHAPES[1:3]:
                        check_sums(*shape, a_bits, b_bits, signed, popcounts)


@pytest.mark.parametrize("level", LEVELS)
def test_any_shape(level):
    with library_of(level):
        for popcounts in ways(level):
            for number in range(1, 40):
                shape = number, 1 + number * 37 % 400, 1 + number * 29 % 150
                check_sums(*shape, 1, 1 + number % 3, popcounts=popcounts)


def test_bits_are_counted():
    """One bit: Python's int.bit_count of whole rows."""
    rng = numpy.random.default_rng(3)
    a, b = rng.integers(0, 2, (5, 333)), rng.integers(0, 2, (333, 7))
    rows, columns = ([int("".join(map(str, line)), 2) for line in lines] for lines in (a, b.T))
    expected = [[(row & column).bit_count() for column in columns] for row in rows]
    found = on_cpu(product(a, b, a_bits=1, b_bits=1, signed=(False, False), popcounts=False))
    assert found.sums.tolist() == expected


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("shape", [(1, 1), (41, 300), (70, 9), (3, 2100)])
def test_rounded_planes(compared, shape, bits, by_column):
    torch.manual_seed(bits)
    x = torch.randn(shape)
    x.view(-1)[0] = math.nan
    x.view(-1)[-1] = -math.inf
    rule = rounding_of(0.4)
    found = compared(RoundBits(x=x, rule=rule, out=to_write(*shape, bits, by_column)))
    largest = max(1, 2 ** (bits - 1) - 1)
    codes = numpy.rint(x.numpy() / numpy.float32(0.4)).clip(-largest if bits > 1 else 0, largest)
    wanted = matrix_of(numpy.nan_to_num(codes).astype(numpy.int64), bits, bits > 1, by_column)
    assert torch.equal(found.out.planes, wanted.planes)
    unsigned = BitRounding(step=torch.tensor([0.1]), start=torch.tensor([-2.0]))
    compared(RoundBits(x=x, rule=unsigned, out=to_write(*shape, bits, by_column)))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("bits, signed", [(1, False), (3, True), (8, True), (8, False)])
def test_unpacked_codes(compared, bits, signed, by_column):
    codes = drawn((41, 139), bits, signed)
    matrix = matrix_of(codes, bits, signed, by_column)
    lines = torch.from_numpy(codes.T if by_column else codes)
    out = empty(*lines.shape, dtype=torch.int8)
    found = compared(UnpackBits(matrix=matrix, codes=out))
    assert torch.equal(found.codes, lines.to(torch.uint8).view(torch.int8))
    larger = UnpackBits(matrix=matrix, codes=empty(150, 300, dtype=torch.int8))
    assert not compared(larger).codes[-6:].any()


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_products_are_rounded_in_the_same_pass(level, by_column):
    for rows, inner, columns in SHAPES:
        a, b = drawn((rows, inner), 2, True), drawn((inner, columns), 3, True, seed=1)
        sums = (a @ b).astype(numpy.float32) * numpy.float32(0.7)
        for bits in (1, 4):
            end = {"factor": torch.tensor([0.7]), "rule": rounding_of(2.5)}
            end["out"] = to_write(rows, columns, bits, by_column)
            with library_of(level):
                found = on_cpu(product(a, b, a_bits=2, b_bits=3, popcounts=False, **end))
            largest = max(1, 2 ** (bits - 1) - 1)
            codes = numpy.rint(sums / numpy.float32(2.5))
            codes = codes.clip(-largest if bits > 1 else 0, largest).astype(numpy.int64)
            wanted = matrix_of(codes, bits, bits > 1, by_column)
            assert torch.equal(found.out.planes, wanted.planes)


def listed(begins: list[int], numbers: list[int]) -> BitTiles:
    return BitTiles(
        begins=torch.tensor(begins, dtype=torch.int32),
        numbers=torch.tensor(numbers, dtype=torch.int32),
    )


def test_only_listed_tiles_are_multiplied(compared):
    """All tiles are ones, and three of 3 x 4 are listed: none, then two, then one."""
    a = numpy.ones((20, 400), numpy.int64)
    b = drawn((400, 50), 2, True)
    tiles = listed([0, 0, 2, 3], [0, 3, 1])
    operation = product(a, b, a_bits=1, b_bits=2, signed=(False, True), tiles=tiles)
    found = compared(operation).sums.numpy()
    assert not found[:8].any()
    assert (found[8:16] == b[:128].sum(0) + b[384:].sum(0)).all()
    assert (found[16:] == b[128:256].sum(0)).all()


@pytest.mark.parametrize("popcounts", [False, True])
def test_the_number_of_threads_changes_nothing(popcounts):
    a, b = drawn((130, 300), 1, False), drawn((300, 333), 2, True)
    before, sums = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        operation = product(
            a, b, a_bits=1, b_bits=2, signed=(False, True), popcounts=popcounts and counts_bits()
        )
        sums.append(on_cpu(operation).sums)
    torch.set_num_threads(before)
    assert torch.equal(*sums)


PAIRS = [(1, 1), (1, 2), (2, 3), (3, 2), (1, 8), (4, 4)]
"""Bits of a and of b; all pairs are specialisations of one kernel."""


def check_kernels(a_bits, b_bits, signed, shapes=SHAPES):
    """Sums and rounded planes are those of the reference and of numpy."""
    for shape in shapes:
        a = drawn(shape[:2], a_bits, signed[0])
        b = drawn(shape[1:], b_bits, signed[1], seed=1)
        bits = {"a_bits": a_bits, "b_bits": b_bits, "signed": signed}
        found = compare_cuda(product(a, b, **bits))
        assert numpy.array_equal(found.sums.numpy(), a @ b)
        for by_column in (False, True):
            out = to_write(shape[0], shape[2], 3, by_column)
            end = {"factor": torch.tensor([0.7]), "rule": rounding_of(2.5), "out": out}
            compare_cuda(product(a, b, **bits, **end))


def turns():
    """Three pairs of tiles, and planes of three bits."""
    check_kernels(1, 2, (False, True), [(9, 700, 40)])
    for by_column in (False, True):
        x = torch.randn(41, 48)
        compare_cuda(RoundBits(x=x, rule=rounding_of(0.4), out=to_write(41, 48, 3, by_column)))
    matrix = matrix_of(drawn((41, 139), 3, True), 3, True, False)
    compare_cuda(UnpackBits(matrix=matrix, codes=empty(41, 139, dtype=torch.int8)))


@pytest.mark.parametrize("a_bits, b_bits", PAIRS[:3])
def test_sums_on_cuda(a_bits, b_bits):
    check_kernels(a_bits, b_bits, (a_bits > 1, True))


@pytest.mark.parametrize("signed", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("a_bits, b_bits", first([*PAIRS, (8, 8)], 0, 2))
def test_all_signs_on_cuda(a_bits, b_bits, signed):
    check_kernels(a_bits, b_bits, signed)


def test_bytes_on_cuda():
    x, codes = (torch.randint(-128, 128, (rows, 48), dtype=torch.int8) for rows in (5, 32))
    sums = empty(5, 32, dtype=torch.int32)
    found = compare_cuda(ByteProduct(x=x, codes=codes, sums=sums))
    assert torch.equal(found.sums.long(), x.long() @ codes.long().t())


def test_larger_matrices_than_a_grid_are_refused():
    planes = torch.empty(1, 8, 0, dtype=torch.uint8)
    matrix = BitMatrix(planes=planes, is_signed=False, by_column=False)
    columns = 65535 * 32 + 1
    sums = torch.empty(1, columns, dtype=torch.int32, device="meta")
    operation = BitProduct(a=matrix, b=matrix, rows=1, columns=columns, popcounts=False, sums=sums)
    with refused("2,097,121 columns are more than 2,097,120: multiply parts"):
        operation.cuda()
