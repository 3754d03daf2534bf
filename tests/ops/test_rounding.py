"""Round, RoundWeight, RoundGradient and Add: codes, packed bits, NaN, every odd length."""

import math

import pytest
import torch

from lsq import quant
from lsq.native import geometry
from lsq.ops.rounding import Add, Round, RoundGradient, RoundWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops.compare import compare, empty, gradient_to_round, on_reference, refused, to_round
from tests.ops.cuda import DTYPES, compare_cuda, run

CLIP = 1.5


def round_of(x, clip=CLIP, **options):
    """x [M, N], to be rounded."""
    return Round(x=x, rounded=to_round(*x.shape, clip, **options))


def weight_of(values, clip, rows, bits=8, *, transposed=False, in_out=False, absmax=False):
    """To round a weight [N, K], or [K, N] if `in_out`, padded to `rows` rows; `absmax`: under the
    largest magnitude of each row."""
    outputs, inputs = values.shape[::-1] if in_out else values.shape
    weight = Weight(
        format=WEIGHT_FORMATS["int8"](bits, Grain.ROW if clip.numel() > 1 else Grain.TENSOR),
        codes=empty(rows, inputs, dtype=torch.int8),
        scale=empty(rows),
        values=values,
        clip=clip,
        in_out=in_out,
        transposed=empty(inputs, rows, dtype=torch.int8) if transposed else None,
    )
    return RoundWeight(weight=weight, new_clip=empty(outputs) if absmax else None)


def gradient_of(gradient):
    rows, columns = gradient.shape
    rounded = gradient_to_round(rows, columns)
    return RoundGradient(gradient=gradient, rounded=rounded, sum=empty(columns))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 2047, 2048, 2049, 6151])
def test_codes_are_exact_at_every_length(bits, numel):
    compare(round_of(torch.randn(1, numel), bits=bits, error=True), exact=True)


@pytest.mark.parametrize("bits", [2, 8])
def test_the_reference_is_the_quantiser(bits):
    x, clip = torch.randn(7, 33), torch.tensor([CLIP])
    found = on_reference(round_of(x, bits=bits, error=True)).rounded
    wanted = quant.quantize(x, clip, bits)
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.clipped, quant.pack_bits(wanted.clipped))
    steps = (found.codes - x / found.scale) / quant.maximum_code(bits)
    assert torch.equal(found.error, torch.where(wanted.clipped, 0.0, steps))
    clip = 0.5 + torch.rand(7)
    found, wanted = on_reference(weight_of(x, clip, 16, bits)).weight, quant.quantize(x, clip, bits)
    assert torch.equal(found.codes[:7], wanted.codes) and torch.equal(found.scale[:7], wanted.scale)
    assert not found.codes[7:].any() and (found.scale[7:] == 1).all()


@pytest.mark.parametrize(
    "clip", [1e-37, 9.3e-37, 2.76e-36, 1e-30, 1e-25, 2.0**-40, 0.01, 0.9, math.pi, 126.9999, 3e38]
)
@pytest.mark.parametrize("rows, columns", [(1, 2053), (24, 40)])
def test_codes_are_those_of_a_division(clip, rows, columns):
    """Next to borders between codes and to the clip, where a quotient off by a bit differs."""
    border = (torch.randint(-127, 128, (rows, columns)) - 0.5) * (torch.tensor(clip) / 127)
    bits = border.view(torch.int32) + torch.randint(-2, 3, (rows, columns), dtype=torch.int32)
    near = bits.view(torch.float32)
    ends = torch.tensor([0.0, -0.0, 1e-45, math.inf, -math.inf]).repeat(columns)[:columns]
    x = torch.cat([near[:-1], torch.where(torch.rand(columns) < 0.3, ends, near[-1])[None]])
    compare(round_of(x, clip), exact=True)


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
    expected = torch.arange(-128, 128).add(0.5).round().clamp(-127, 127).tolist()
    assert found.codes[0].tolist() == [*expected, 127, -127, 0, 0, 0, 0, 127, -127, 127, -127]
    outside = quant.unpack_bits(found.clipped, x.numel())
    assert outside.nonzero().flatten().tolist() == [0, 255, 262, 263, 264, 265]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 2048, -1])
def test_nan_poisons_the_scale_and_is_seen(value, place, where, compared):
    x = torch.randn(1, 4100 if where == "cpu" else 4104)
    x[0, place] = value
    found = compared(round_of(x), exact=True).rounded
    assert found.scale.isnan().item() == found.seen.isnan().item() == math.isnan(value)
    assert found.codes.count_nonzero() > 4000
    if math.isnan(value):
        assert found.codes[0, place] == 0
        assert not quant.unpack_bits(found.clipped, x.numel())[place]


@pytest.mark.parametrize("shape", [(1, 2053), (24, 40), (0, 8)])
@pytest.mark.parametrize("clip", [1.5, 1e-30])
def test_the_largest_magnitude_is_seen(shape, clip):
    x = torch.randn(shape)
    for before in (0.0, 2.0, 100.0):
        found = compare(round_of(x, clip, seen=before)).rounded
        assert found.seen == max(before, x.abs().max().item() if x.numel() else 0.0)


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("clips", [1, 33])
@pytest.mark.parametrize("rows", [33, 48])
def test_weights(bits, clips, rows, where, same_codes):
    for columns in (1, 17, 48) if where == "cpu" else (48, 1040):
        same_codes(weight_of(torch.randn(33, columns), 0.5 + torch.rand(clips), rows, bits))


@pytest.mark.parametrize("rows, columns", [(33, 17), (7, 48), (1, 1)])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_under_their_largest_magnitudes(rows, columns, in_out, dtype):
    values = torch.randn(rows, columns).to(dtype)
    values[0] = 0.0
    values[-1] *= 1e-20
    clip = 1.0 + torch.rand(rows)
    largest = values.float().abs().amax(1).clamp(min=quant.SMALLEST_CLIP)
    given = values.t().contiguous() if in_out else values
    operation = weight_of(given, clip, rows + 3, in_out=in_out, absmax=True)
    found = compare(operation, exact=True)
    assert torch.equal(found.new_clip, torch.where((values == 0).all(1), clip, largest))


@pytest.mark.parametrize("columns", [48, 1040])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_what_is_not_finite_poisons_its_row_under_its_largest_magnitude(columns, value, compared):
    values = torch.randn(33, columns)
    values[[2, 7]] = torch.tensor([[0.0], [value]])
    found = compared(weight_of(values, 0.5 + torch.rand(33), 48, absmax=True), exact=True)
    assert found.weight.scale.isnan().tolist() == [bool(value) and row == 7 for row in range(48)]


@pytest.mark.parametrize("clips", [1, 41])
def test_nan_in_a_weight_poisons_what_shares_its_clip(clips, compared):
    values = torch.randn(41, 48)
    values[3, 2], values[29, 47], values[30, 0] = math.nan, math.nan, math.inf
    found = compared(weight_of(values, torch.ones(clips), 48), exact=True).weight
    lost = [3, 29] if clips > 1 else list(range(41))
    assert found.scale.isnan().nonzero().flatten().tolist() == lost
    assert found.codes[3, 2] == found.codes[29, 47] == 0


@pytest.mark.parametrize("rows", [0, 1, 7, 41, 341])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_rounded_and_summed(rows, dtype, where, same_codes):
    for columns in (3, 17, 48) if where == "cpu" else (48,):
        gradient = torch.randn(rows, columns)
        if rows > 1:
            gradient[1, 0] = math.inf
        found = same_codes(gradient_of(gradient), dtype)
        assert found.rounded.scale.isnan().sum() == (rows > 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns", [(0, 48), (1, 48), (41, 48), (7, 1040), (11, 2992)])
def test_codes_scale_and_bits_on_cuda(rows, columns, dtype):
    compare_cuda(round_of(torch.randn(rows, columns), error=True), dtype, exact=True)


@pytest.mark.parametrize("clip", [1e-27, 1e-24, 0.1, 3.3, 7.0, 127.0, 1e36, math.inf])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_those_of_quotients_beside_every_tie_on_cuda(clip, bits):
    largest = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * largest - 3, 2 * largest + 4, dtype=torch.float64) / 2
    x = (steps * min(clip, 1e36) / largest).float()
    infinity = torch.tensor(math.inf)
    x = torch.cat([x, x.nextafter(infinity), x.nextafter(-infinity)])
    x = x[: x.numel() // 8 * 8].reshape(1, -1).contiguous()
    compare_cuda(round_of(x, clip, bits=bits), exact=True)


def test_codes_of_a_weight_in_both_layouts_on_cuda():
    operation = weight_of(torch.randn(141, 272), 0.5 + torch.rand(141), 144, transposed=True)
    found = compare_cuda(operation).weight
    assert torch.equal(found.transposed, found.codes.t())


def test_widths_that_kernels_do_not_take_are_refused_on_cuda():
    with refused("what is rounded is 41.*multiple of 8"):
        run(round_of(torch.randn(7, 41)))
    with refused("width of transposed codes is 33.*multiple of 16"):
        run(weight_of(torch.randn(33, 48), torch.ones(33), 33, transposed=True))
    with refused("width of a weight is 40.*multiple of 16"):
        run(weight_of(torch.randn(7, 40), torch.ones(1), 16))


def test_wide_gradients_are_rounded_and_summed_apart_on_cuda():
    operation = gradient_of(torch.randn(3, 8208))
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


def turns(columns):
    """Three turns of each loop: rows of a weight, its padding, rows of a gradient."""
    for rows, padded in ((41, 48), (1, 41)):
        values = torch.randn(rows, columns)
        values[-1, 5] = math.nan
        compare_cuda(weight_of(values, torch.ones(1), padded), exact=True)
    compare_cuda(gradient_of(torch.randn(41, columns)))
    compare_cuda(Add(a=torch.randn(7, 13), b=torch.randn(7, 13), out=empty(7, 13)))


@pytest.mark.parametrize("columns, rows", [(48, 8), (1040, 2)])
def test_more_rows_than_a_warp_draws_words_for_at_a_time_on_cuda(columns, rows, monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: 1)
    gradient = torch.randn(rows * 33 + 1, columns)
    rounded = gradient_to_round(*gradient.shape)
    compare_cuda(RoundGradient(gradient=gradient, rounded=rounded), exact=True)
