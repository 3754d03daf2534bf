"""Round, RoundWeight, RoundGradient and Add on the CPU and on CUDA: codes, packed bits, NaN, and
every odd length."""

import math

import pytest
import torch

from lsq import quant
from lsq.native import geometry
from lsq.ops.rounding import Add, Round, RoundGradient, RoundWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain, arithmetic
from tests.ops.compare import KEY, compare, empty, gradient_to_round, refused, to_round
from tests.ops.cuda import DTYPES, compare_cuda, run

CLIP = 1.5


def round_of(x, clip=CLIP, **options):
    """x [M, N], to be rounded."""
    return Round(x=x, rounded=to_round(*x.shape, clip, **options))


def weight_of(values, clip, rows, bits=8, *, transposed=False):
    """A weight to be rounded, padded to `rows` rows, with its codes in both layouts on a GPU."""
    grain = Grain.ROW if clip.numel() > 1 else Grain.TENSOR
    codes = empty(rows, values.shape[1], dtype=torch.int8)
    form = WEIGHT_FORMATS["int8"](bits, grain)
    turned = empty(values.shape[1], rows, dtype=torch.int8) if transposed else None
    return RoundWeight(
        weight=Weight(
            format=form, codes=codes, scale=empty(rows), values=values, clip=clip, transposed=turned
        )
    )


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 2047, 2048, 2049, 6151])
def test_codes_are_exact_at_every_length(bits, numel):
    x = torch.randn(1, numel)
    found = compare(round_of(x, bits=bits, error=True)).rounded
    wanted = quant.quantize(x, torch.tensor([CLIP]), bits)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.clipped, quant.pack_bits(wanted.clipped))
    expected = torch.where(
        wanted.clipped, 0.0, (found.codes - x / found.scale) / quant.maximum_code(bits)
    )
    assert torch.equal(found.error, expected)


@pytest.mark.parametrize(
    "clip", [1e-37, 9.3e-37, 2.76e-36, 1e-30, 1e-25, 2.0**-40, 0.01, 0.9, math.pi, 126.9999, 3e38]
)
@pytest.mark.parametrize("rows, columns", [(1, 2053), (24, 40)])
def test_codes_are_those_of_a_division(clip, rows, columns):
    """Next to the borders between codes and to the clip, where a quotient that is off by a bit
    rounds otherwise."""
    clip = torch.tensor([clip])
    border = (torch.randint(-127, 128, (rows, columns)) - 0.5) * (clip / 127)
    near = (
        border.view(torch.int32) + torch.randint(-2, 3, (rows, columns), dtype=torch.int32)
    ).view(torch.float32)
    ends = torch.tensor([0.0, -0.0, 1e-45, math.inf, -math.inf]).repeat(columns)[:columns]
    x = torch.cat([near[:-1], torch.where(torch.rand(columns) < 0.3, ends, near[-1])[None]])
    found = compare(round_of(x, clip.item())).rounded
    wanted = quant.quantize(x, clip, 8)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.clipped, quant.pack_bits(wanted.clipped))


def test_without_bits_for_a_backward_pass():
    found = compare(round_of(torch.randn(7, 5), clipped=False)).rounded
    assert found.clipped is None and found.error is None


def test_borders_between_codes():
    """Halves go to the even neighbour, and the clip itself is inside."""
    scale = 2.0**-6
    clip = torch.tensor([127 * scale])
    halves = (torch.arange(-128, 128) + 0.5) * scale
    inside = torch.tensor([127.0, -127.0, 0.0, -0.0, 1e-42, -1e-42]) * scale
    beyond = torch.nextafter(clip, torch.tensor([math.inf]))
    x = torch.cat([halves, inside, beyond, -beyond, torch.tensor([math.inf, -math.inf])])[None]
    found = compare(round_of(x, clip.item())).rounded
    expected = torch.cat(
        [
            torch.arange(-128, 128).add(0.5).round().clamp(-127, 127),
            torch.tensor([127, -127, 0, 0, 0, 0, 127, -127, 127, -127]),
        ]
    )
    assert torch.equal(found.codes[0], expected.to(torch.int8))
    outside = quant.unpack_bits(found.clipped, x.numel())
    assert outside.nonzero().flatten().tolist() == [0, 255, 262, 263, 264, 265]


@pytest.mark.parametrize("place", [0, 5, 2048, 4099])
def test_nan_poisons_the_scale(place):
    x = torch.randn(1, 4100)
    x[0, place] = math.nan
    found = compare(round_of(x)).rounded
    assert found.codes[0, place] == 0 and found.scale.isnan()
    assert not quant.unpack_bits(found.clipped, 4100)[place]
    assert found.codes.count_nonzero() > 4000


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("clips", [1, 33])
@pytest.mark.parametrize("rows", [33, 48])
@pytest.mark.parametrize("columns", [1, 17, 48])
def test_weights(bits, clips, rows, columns):
    values, clip = torch.randn(33, columns), 0.5 + torch.rand(clips)
    found = compare(weight_of(values, clip, rows, bits)).weight
    wanted = quant.quantize(values, clip, bits)
    assert torch.equal(found.codes[:33], wanted.codes)
    assert torch.equal(found.scale[:33], wanted.scale.expand(33))
    assert not found.codes[33:].any() and (found.scale[33:] == 1).all()


@pytest.mark.parametrize("rows, columns", [(33, 17), (7, 48), (1, 1)])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_under_their_largest_magnitudes(rows, columns, in_out, dtype):
    values = torch.randn(rows, columns).to(dtype)
    values[0] = 0.0
    values[-1] *= 1e-20
    clip = 1.0 + torch.rand(rows)
    wanted = torch.where(
        (values == 0).all(1), clip, values.float().abs().amax(1).clamp(min=quant.SMALLEST_CLIP)
    )
    operation = weight_of(values.t().contiguous() if in_out else values, clip, rows + 3)
    operation.weight.codes, operation.weight.in_out = (
        empty(rows + 3, columns, dtype=torch.int8),
        in_out,
    )
    operation.new_clip = empty(rows)
    found = compare(operation)
    assert torch.equal(found.new_clip, wanted)
    codes, scale, clipped = quant.quantize(values.float(), wanted)
    assert torch.equal(found.weight.codes[:rows], codes) and torch.equal(
        found.weight.scale[:rows], scale
    )
    assert not clipped.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_poisons_its_row_under_its_largest_magnitude(value):
    operation = weight_of(torch.randn(7, 48), torch.ones(7), 7)
    operation.weight.values[2, 5] = value
    operation.new_clip = empty(7)
    found = compare(operation)
    assert found.weight.scale.isnan().tolist() == [row == 2 for row in range(7)]


@pytest.mark.parametrize("shape", [(1, 2053), (24, 40), (0, 8)])
@pytest.mark.parametrize("clip", [1.5, 1e-30])
def test_the_largest_magnitude_is_seen(shape, clip):
    x = torch.randn(shape)
    for before in (0.0, 2.0, 100.0):
        found = compare(round_of(x, clip, seen=before)).rounded
        assert found.seen == max(before, x.abs().max().item() if x.numel() else 0.0)


def test_a_nan_is_seen():
    x = torch.randn(3, 40)
    x[1, 7] = math.nan
    assert compare(round_of(x)).rounded.seen.isnan()


@pytest.mark.parametrize("rows, columns", [(0, 3), (1, 1), (7, 3), (41, 17), (341, 48)])
def test_gradients_are_rounded_and_summed(rows, columns):
    gradient = torch.randn(rows, columns)
    if rows > 1:
        gradient[1, 0] = math.inf
    found = compare(
        RoundGradient(
            gradient=gradient, rounded=gradient_to_round(rows, columns), sum=empty(columns)
        )
    )
    codes, scale = arithmetic.round_rows(gradient, found.rounded.weight_scale, KEY, 7)
    assert torch.equal(found.rounded.codes, codes)
    assert torch.equal(found.rounded.scale.nan_to_num(-1.0), scale.nan_to_num(-1.0))
    assert scale.isnan().sum() == (rows > 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns", [(0, 48), (1, 48), (7, 48), (41, 48), (7, 1040), (11, 2992)]
)
def test_codes_scale_and_bits_on_cuda(rows, columns, dtype):
    compare_cuda(round_of(torch.randn(rows, columns), error=True), dtype, exact=True)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ties_round_to_even_at_every_width_on_cuda(bits):
    largest = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * largest - 24, 2 * largest + 24) / 2
    x = steps[: steps.numel() // 8 * 8].reshape(1, -1).contiguous()
    compare_cuda(round_of(x, float(largest), bits=bits), exact=True)


@pytest.mark.parametrize("clip", [1e-27, 1e-24, 0.1, 3.3, 1e36, math.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_quotients_beside_every_tie_on_cuda(clip, bits):
    largest = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * largest - 3, 2 * largest + 4, dtype=torch.float64) / 2
    x = (steps * min(clip, 1e36) / largest).float()
    infinity = torch.tensor(math.inf)
    x = torch.cat([x, x.nextafter(infinity), x.nextafter(-infinity)])
    x = x[: x.numel() // 8 * 8].reshape(1, -1).contiguous()
    compare_cuda(round_of(x, clip, bits=bits), exact=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 400, 341 * 48 - 1])
def test_nan_poisons_the_scale_on_cuda(value, place):
    x = torch.randn(341, 48)
    x.view(-1)[place] = value
    found = compare_cuda(round_of(x), exact=True).rounded
    assert found.scale.isnan().item() == math.isnan(value)


def test_a_width_that_no_vector_fits_is_refused_on_cuda():
    with refused("what is rounded is 41.*multiple of 8"):
        compare_cuda(round_of(torch.randn(7, 41)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clips", [1, 33])
@pytest.mark.parametrize("rows", [33, 48])
@pytest.mark.parametrize("columns", [48, 1040])
def test_weights_on_cuda(bits, clips, rows, columns):
    compare_cuda(
        weight_of(torch.randn(33, columns), 0.5 + torch.rand(clips), rows, bits), exact=True
    )


@pytest.mark.parametrize("columns", [48, 1040])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_weights_under_their_largest_magnitudes_on_cuda(columns, value):
    operation = weight_of(torch.randn(33, columns), 0.5 + torch.rand(33), 48)
    operation.weight.values[[2, 7]] = torch.tensor([[0.0], [value]])
    operation.new_clip = empty(33)
    compare_cuda(operation, exact=True)


def test_codes_of_a_weight_in_both_layouts_on_cuda():
    found = compare_cuda(
        weight_of(torch.randn(141, 272), 0.5 + torch.rand(141), 144, transposed=True)
    ).weight
    assert torch.equal(found.transposed, found.codes.t())
    with refused("width of transposed codes is 33.*multiple of 16"):
        run(weight_of(torch.randn(33, 48), torch.ones(33), 33, transposed=True))


def test_a_weight_whose_codes_no_product_takes_is_refused_on_cuda():
    with refused("width of a weight is 40.*multiple of 16"):
        compare_cuda(weight_of(torch.randn(7, 40), torch.ones(1), 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 7, 341])
def test_gradients_are_rounded_and_summed_on_cuda(rows, dtype):
    gradient = torch.randn(rows, 48)
    if rows > 1:
        gradient[1, 0] = math.inf
    operation = RoundGradient(gradient=gradient, rounded=gradient_to_round(rows, 48), sum=empty(48))
    found = compare_cuda(operation, dtype, exact=True)
    assert found.rounded.scale.isnan().sum() == (rows > 1)


def test_wide_gradients_are_rounded_and_summed_apart_on_cuda():
    operation = RoundGradient(
        gradient=torch.randn(3, 8208), rounded=gradient_to_round(3, 8208), sum=empty(8208)
    )
    compare_cuda(operation)
    assert len(operation.cuda(torch.empty(3, 8212, device="meta"))) == 3


def test_gradients_that_are_rounded_alone_or_summed_alone(compared):
    gradient = torch.randn(41, 48)
    rounded = gradient_to_round(41, 48)
    assert compared(RoundGradient(gradient=gradient, rounded=rounded), exact=True).sum is None
    found = compared(RoundGradient(gradient=gradient, sum=empty(48)))
    torch.testing.assert_close(found.sum, gradient.sum(dim=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (7, 13), (41, 48)])
def test_add(shape, dtype, compared):
    compared(Add(a=torch.randn(shape), b=torch.randn(shape), out=empty(*shape)), dtype)


@pytest.mark.parametrize("clips", [1, 41])
def test_nan_in_a_weight_poisons_what_shares_its_clip(clips, compared):
    values = torch.randn(41, 48)
    values[3, 2], values[29, 47], values[30, 0] = math.nan, math.nan, math.inf
    found = compared(weight_of(values, torch.ones(clips), 48), exact=True).weight
    lost = [3, 29] if clips > 1 else list(range(41))
    assert found.scale.isnan().nonzero().flatten().tolist() == lost
    assert found.codes[3, 2] == found.codes[29, 47] == 0


def turns(columns):
    """Three turns of each loop where two blocks stride: rows of a weight, its padding, and rows of
    a gradient."""
    for rows, padded in ((41, 48), (1, 41)):
        values = torch.randn(rows, columns)
        values[-1, 5] = math.nan
        compare_cuda(weight_of(values, torch.ones(1), padded), exact=True)
    gradient = torch.randn(41, columns)
    compare_cuda(
        RoundGradient(gradient=gradient, rounded=gradient_to_round(41, columns), sum=empty(columns))
    )
    compare_cuda(Add(a=torch.randn(7, 13), b=torch.randn(7, 13), out=empty(7, 13)))


@pytest.mark.parametrize("columns, rows", [(48, 8), (1040, 2)])
def test_more_rows_than_a_warp_draws_words_for_at_a_time_on_cuda(columns, rows, monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: 1)
    gradient = torch.randn(rows * 33 + 1, columns)
    compare_cuda(
        RoundGradient(gradient=gradient, rounded=gradient_to_round(*gradient.shape)), exact=True
    )


@pytest.mark.parametrize("columns", [48, 1040])
def test_three_turns_on_cuda(columns, monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(2, turns)))
    turns(columns)
