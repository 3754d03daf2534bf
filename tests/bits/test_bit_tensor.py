"""Bit tensors beside formulas in numpy: quantisers, layout, products in both ways, bad input."""

import itertools
import math

import numpy
import pytest
import torch

from lsq.bits import BitTensor, to_bits
from lsq.quant.stored import BYTES_SUMMED
from lsq.run import backends
from tests.defaults import other_defaults
from tests.native.levels import LEVELS, library_of
from tests.ops.compare import refused

WAYS = ("planes", "bytes")
SIGNS = (True, False)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(m, k, n, a_bits=2, b_bits=3, signed=SIGNS) -> tuple[BitTensor, BitTensor]:
    a = to_bits(drawn(m, k), a_bits, signed=signed[0])
    return a, to_bits(drawn(k, n, seed=1), b_bits, along="columns", signed=signed[1])


@pytest.mark.parametrize("bits", range(2, 9))
def test_signed_codes(bits):
    x = drawn(7, 130)
    largest = 2 ** (bits - 1) - 1
    for clip in (1.25, torch.tensor([1.25]), "absmax", "mse"):
        found = to_bits(x, bits, clip=clip)
        scale = numpy.float32(found.scale.item())
        if clip != "mse":
            wanted = x.abs().max().item() if clip == "absmax" else 1.25
            assert scale == numpy.float32(wanted) / numpy.float32(largest)
        codes = numpy.rint(x.numpy() / scale).clip(-largest, largest)
        assert numpy.array_equal(found.codes().numpy(), codes) and found.codes().dtype == torch.int8
        assert numpy.array_equal(found.to_val().numpy(), codes.astype(numpy.float32) * scale)


@pytest.mark.parametrize("bits", range(1, 9))
def test_unsigned_codes_are_qgtcs(bits):
    x = drawn(300, 3)
    found = to_bits(x, bits, signed=False, along="columns")
    least, most = x.min().numpy(), x.max().numpy()
    scale = (most - least) / numpy.float32(2**bits)
    codes = numpy.floor((x.numpy() - least) / scale).clip(0, 2**bits - 1)
    assert numpy.array_equal(found.codes().numpy(), codes) and found.codes().dtype == torch.uint8
    assert codes.max() == 2**bits - 1
    error = (found.to_val() - x).abs().max().item()
    assert error <= scale * (1 + 1e-5)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")
def test_one_bit_is_the_adjacency_matrix():
    edges = torch.rand(37, 37) < 0.1
    for signed in SIGNS:
        for given in (edges, edges.to_sparse(), edges.float().to_sparse_csr()):
            assert torch.equal(to_bits(given, 1, signed=signed).codes().bool(), edges)
    assert torch.equal(to_bits(edges, 1).to_val(), edges.float())
    assert to_bits(torch.tensor([[-9.0, 0.4, 0.6, 1.0]]), 1, clip=1.0).codes().tolist() == [
        [0, 0, 1, 1]
    ]
    assert not to_bits(torch.zeros(3, 3), 1).codes().any()
    assert to_bits(torch.full((2, 2), 7.0), 3, signed=False).to_val().tolist() == [[7.0, 7.0]] * 2


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("m, k", [(1, 1), (9, 129), (17, 40)])
def test_layout_is_qgtcs(m, k, along):
    """Words of 32 codes: 3 x PAD8(M) x PAD128(K) / 32, and 3 x PAD128(K) / 32 x PAD8(N)."""
    codes = torch.randint(-3, 4, (m, k) if along == "rows" else (k, m))
    found = to_bits(codes, 3, clip=3.0, along=along)
    words = (k + 127) // 128 * 4
    lines = (m + 7) // 8 * 8
    wanted = numpy.zeros((3, lines, words) if along == "rows" else (3, words, lines), numpy.uint32)
    for line in range(m):
        for i in range(k):
            code = int(codes[line, i] if along == "rows" else codes[i, line])
            for plane in range(3):
                bit = numpy.uint32((code >> plane & 1) << i % 32)
                where = (line, i // 32) if along == "rows" else (i // 32, line)
                wanted[(plane, *where)] |= bit
    assert found.planes.numpy().tobytes() == wanted.tobytes()
    assert found.planes.view(torch.int32).shape == wanted.shape
    assert found.nbytes == wanted.nbytes == 3 * lines * words * 4
    assert torch.equal(found.codes().long(), codes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("signed", list(itertools.product(SIGNS, SIGNS)))
def test_both_ways_give_the_exact_sums(way, signed):
    for a_bits, b_bits in itertools.product(range(1, 9), repeat=2):
        a, b = operands(5, 131, 19, a_bits, b_bits, signed)
        wanted = a.codes().numpy().astype(numpy.int64) @ b.codes().numpy().astype(numpy.int64)
        assert numpy.array_equal(a._sums(b, way).numpy(), wanted)


@pytest.mark.parametrize("signed", [SIGNS, SIGNS[::-1], (False, False)])
@pytest.mark.parametrize("way", WAYS)
def test_kernels_give_the_exact_sums(way, signed, monkeypatch):
    """In the emulator, as on a GPU."""
    monkeypatch.setattr(backends, "run", backends.backend("emulated").run)
    monkeypatch.setattr(BitTensor, "device", torch.device("cuda"))
    for a_bits, b_bits in ((1, 2), (8, 8), (8, 3)):
        a, b = operands(5, 131, 19, a_bits, b_bits, signed)
        wanted = a.codes().long() @ b.codes().long()
        assert torch.equal(a._sums(b, way).long(), wanted)
        assert a._rounded(b, way, 3, 9.0, "columns").codes().shape == (5, 19)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_every_library(level, way):
    with library_of(level):
        for bits in (1, 4, 8):
            a, b = operands(33, 70, 41, bits, bits)
            wanted = a.codes().long() @ b.codes().long()
            assert torch.equal(a._sums(b, way).long(), wanted)


def test_extreme_codes():
    """The longest sums of 8 unsigned bits, all of 255 x 255."""
    inner = (2**31 - 1) // 255**2
    x = torch.ones(1, inner)
    x[0, 0] = 0
    a, b = to_bits(x, 8, signed=False), to_bits(x.t(), 8, signed=False, along="columns")
    for way in WAYS:
        assert a._sums(b, way).item() == 255**2 * (inner - 1)
    longer = torch.ones(1, inner + 1)
    a, b = (
        to_bits(one, 8, signed=False, along=along)
        for one, along in ((longer, "rows"), (longer.t(), "columns"))
    )
    with refused(r"33,026 products of 8 and 8 bits might not fit 32 bits; at most 33,025"):
        a @ b


def test_longer_sums_than_bytes_have():
    x = torch.ones(1, BYTES_SUMMED + 1)
    assert (to_bits(x, 8) @ to_bits(x.t(), 8, along="columns")).item() == 127**2 * x.numel()


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_products_are_rounded_alike(bits, along):
    a, b = operands(41, 200, 50)
    made = [a._rounded(b, way, bits, 9.0, along) for way in WAYS]
    made.append(a.product(b, bits=bits, clip=torch.tensor([9.0]), along=along))
    sums = (a.codes().long() @ b.codes().long()).float() * (a.scale * b.scale)
    largest = max(1, 2 ** (bits - 1) - 1)
    codes = (
        (sums / (torch.tensor(9.0) / largest)).round().clamp(-largest if bits > 1 else 0, largest)
    )
    for one in made:
        assert torch.equal(one.codes().float(), codes) and one.shape == (41, 50)
        assert torch.equal(one.planes, made[0].planes) and one.along == along
        assert torch.allclose(one.scale, torch.tensor([9.0 / largest]))


def test_a_graph_convolution_stays_in_bits():
    """A (X W): the inner product is the right operand of the outer one."""
    edges = torch.rand(70, 70) < 0.2
    a, x = to_bits(edges, 1), to_bits(drawn(70, 33), 4)
    w = to_bits(drawn(33, 20, seed=2), 4, along="columns")
    inner = x.product(w, bits=3, clip=8.0, along="columns")
    assert torch.equal((a @ inner).long(), edges.long() @ inner.codes().long())


def test_tiles_of_zeros_are_jumped():
    x = torch.zeros(40, 1000)
    x[3, 5] = x[20, 999] = x[23, 130] = 1
    a, b = to_bits(x, 1), to_bits(drawn(1000, 16), 2, along="columns")
    assert (a.tile_count, a.jumped) == (40, 37)
    assert a._tiles.begins.tolist() == [0, 1, 1, 3, 3, 3] and a._tiles.numbers.tolist() == [0, 1, 7]
    assert torch.equal(a._sums(b, "planes").long(), x.long() @ b.codes().long())
    assert b.jumped == 0 and to_bits(x, 2).jumped == 0
    empty = to_bits(torch.zeros(3, 3), 1)
    assert empty.jumped == 1
    assert not (empty @ to_bits(torch.ones(3, 2), 1, along="columns")).any()


def test_nan_and_infinity():
    x = drawn(3, 40)
    x[1, 7] = math.nan
    for found in (to_bits(x, 4, clip=1.0), to_bits(x, 4, signed=False)):
        assert found.to_val().isnan().all()
        assert found.product(operands(3, 40, 2)[1], bits=4, clip=1.0).to_val().isnan().all()
    with refused("NaN or infinite"):
        to_bits(x, 4)
    x[1, 7] = math.inf
    assert to_bits(x, 4, clip=1.0).to_val()[1, 7] == 1.0
    assert to_bits(x, 4, signed=False).to_val().isnan().all()


def test_moved_to_a_device():
    a = to_bits(drawn(3, 40), 4, signed=False)
    assert a.to("cpu") is a
    moved = a.to("meta")
    assert {one.device.type for one in (moved.planes, moved.scale, moved.offset)} == {"meta"}
    with refused("on meta and cpu; move one"):
        moved @ operands(3, 40, 2)[1]


@pytest.mark.parametrize("signed", [SIGNS, (False, False)])
@pytest.mark.parametrize("way", WAYS)
def test_other_defaults_change_nothing(way, signed):
    expected = operands(9, 130, 17, 3, 8, signed)
    x, y = drawn(9, 130), drawn(130, 17, seed=1)
    with other_defaults():
        a, b = to_bits(x, 3, signed=signed[0]), to_bits(y, 8, along="columns", signed=signed[1])
        sums, rounded = a._sums(b, way), a._rounded(b, way, 3, 1.0, "rows").to_val()
    assert torch.equal(sums, expected[0]._sums(expected[1], way))
    assert torch.equal(rounded, expected[0]._rounded(expected[1], way, 3, 1.0, "rows").to_val())
    assert torch.equal(b.to_val(), expected[1].to_val()) and rounded.dtype == torch.float32


def test_gradients_are_refused():
    x = drawn(3, 4).requires_grad_()
    with refused("have no gradients"):
        to_bits(x, 2)
    with torch.no_grad():
        assert not to_bits(x, 2).to_val().requires_grad


@pytest.mark.parametrize("bits", [0, 9, 2.5, True, "3"])
def test_other_bits_are_refused(bits):
    with refused("must be a whole number from 1 to 8"):
        to_bits(drawn(3, 4), bits)
    a, b = operands(3, 4, 2)
    with refused("must be a whole number from 1 to 8"):
        a.product(b, bits=bits, clip=1.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf, torch.tensor([-1.0])])
def test_a_clip_is_positive(clip):
    with refused("a clip must be finite"):
        to_bits(drawn(3, 4), 4, clip=clip)
    a, b = operands(3, 4, 2)
    with refused("a clip must be finite"):
        a.product(b, bits=4, clip=clip)


@pytest.mark.parametrize("clip", ["max", True, torch.ones(2), [1.0]])
def test_other_clips_are_refused(clip):
    with refused("give a number above 0, a tensor"):
        to_bits(drawn(3, 4), 4, clip=clip)


def test_measured_clips_have_their_limits():
    with refused("give a number above 0"):
        to_bits(drawn(3, 4), 1, clip="mse")
    with refused("give a number above 0"):
        operands(3, 4, 2)[0].product(operands(3, 4, 2)[1], bits=2, clip="absmax")
    with refused("from the least to the largest value"):
        to_bits(drawn(3, 4), 4, clip=1.0, signed=False)


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(0, 3), [[1.0]], None]
)
def test_only_matrices_become_bits(tensor):
    with refused(r"made of a tensor \[rows, columns\]"):
        to_bits(tensor, 2)


def test_operands_that_do_not_fit():
    a, b = operands(3, 40, 2)
    with refused("along is 'inner'"):
        to_bits(drawn(3, 4), 2, along="inner")
    with refused("the left operand .* packed along columns; pack it along rows"):
        b @ b
    with refused("the right operand .* packed along rows; pack it along columns"):
        a @ a
    with refused(r"\[3, 40\] and \[41, 2\]"):
        a @ operands(3, 41, 2)[1]
    with pytest.raises(TypeError, match="make the other operand by to_bits"):
        a @ drawn(40, 2)
