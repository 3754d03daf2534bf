"""Round, RoundWeight, RoundGradient and Add on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq.native import geometry
from lsq.native.compiler import compile_kernels
from lsq.ops.rounding import Add, RoundGradient
from tests.ops.compare import empty, gradient_to_round
from tests.ops.cuda import DTYPES, compare_cuda, run
from tests.ops.test_rounding import round_of, weight_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns", [(0, 48), (1, 48), (7, 48), (41, 48), (7, 1040), (11, 2992)]
)
def test_codes_scale_and_bits(rows, columns, dtype):
    compare_cuda(round_of(torch.randn(rows, columns), error=True), dtype, exact=True)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ties_round_to_even_at_every_width(bits):
    largest = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * largest - 24, 2 * largest + 24) / 2
    x = steps[: steps.numel() // 8 * 8].reshape(1, -1).contiguous()
    compare_cuda(round_of(x, float(largest), bits=bits), exact=True)


@pytest.mark.parametrize("clip", [1e-27, 1e-24, 0.1, 3.3, 1e36, math.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_quotients_beside_every_tie(clip, bits):
    largest = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * largest - 3, 2 * largest + 4, dtype=torch.float64) / 2
    x = (steps * min(clip, 1e36) / largest).float()
    infinity = torch.tensor(math.inf)
    x = torch.cat([x, x.nextafter(infinity), x.nextafter(-infinity)])
    x = x[: x.numel() // 8 * 8].reshape(1, -1).contiguous()
    compare_cuda(round_of(x, clip, bits=bits), exact=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 400, 341 * 48 - 1])
def test_nan_poisons_the_scale(value, place):
    x = torch.randn(341, 48)
    x.view(-1)[place] = value
    found = compare_cuda(round_of(x), exact=True).rounded
    assert found.scale.isnan().item() == math.isnan(value)


def test_a_width_that_no_vector_fits_is_refused():
    with pytest.raises(ValueError, match="what is rounded is 41.*multiple of 8"):
        compare_cuda(round_of(torch.randn(7, 41)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clips", [1, 33])
@pytest.mark.parametrize("rows", [33, 48])
@pytest.mark.parametrize("columns", [48, 1040])
def test_weights(bits, clips, rows, columns):
    compare_cuda(
        weight_of(torch.randn(33, columns), 0.5 + torch.rand(clips), rows, bits), exact=True
    )


@pytest.mark.parametrize("columns", [48, 1040])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_weights_under_their_largest_magnitudes(columns, value):
    operation = weight_of(torch.randn(33, columns), 0.5 + torch.rand(33), 48)
    operation.weight.values[[2, 7]] = torch.tensor([[0.0], [value]])
    operation.new_clip = empty(33)
    compare_cuda(operation, exact=True)


def test_codes_of_a_weight_in_both_layouts():
    found = compare_cuda(
        weight_of(torch.randn(141, 272), 0.5 + torch.rand(141), 144, transposed=True)
    ).weight
    assert torch.equal(found.transposed, found.codes.t())
    with pytest.raises(ValueError, match="width of transposed codes is 33.*multiple of 16"):
        run(weight_of(torch.randn(33, 48), torch.ones(33), 33, transposed=True))


@pytest.mark.parametrize("clips", [1, 41])
def test_nan_in_a_weight_poisons_what_shares_its_clip(clips):
    values = torch.randn(41, 48)
    values[3, 2], values[29, 47], values[30, 0] = math.nan, math.nan, math.inf
    found = compare_cuda(weight_of(values, torch.ones(clips), 48), exact=True).weight
    assert found.scale.isnan().sum() == (2 if clips > 1 else 41)


def test_a_weight_whose_codes_no_product_takes_is_refused():
    with pytest.raises(ValueError, match="width of a weight is 40.*multiple of 16"):
        compare_cuda(weight_of(torch.randn(7, 40), torch.ones(1), 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 7, 341])
def test_gradients_are_rounded_and_summed(rows, dtype):
    gradient = torch.randn(rows, 48)
    if rows > 1:
        gradient[1, 0] = math.inf
    operation = RoundGradient(gradient=gradient, rounded=gradient_to_round(rows, 48), sum=empty(48))
    found = compare_cuda(operation, dtype, exact=True)
    assert found.rounded.scale.isnan().sum() == (rows > 1)


def test_gradients_that_are_summed_alone():
    compare_cuda(RoundGradient(gradient=torch.randn(41, 48), sum=empty(48)))


def test_gradients_that_are_rounded_alone():
    compare_cuda(
        RoundGradient(gradient=torch.randn(41, 48), rounded=gradient_to_round(41, 48)), exact=True
    )


def test_wide_gradients_are_rounded_and_summed_apart():
    operation = RoundGradient(
        gradient=torch.randn(3, 8208), rounded=gradient_to_round(3, 8208), sum=empty(8208)
    )
    compare_cuda(operation)
    assert len(operation.cuda(torch.empty(3, 8212, device="meta"))) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_the_widest_gradients_spill_no_registers(target):
    for rounded, summed in ((1, 0), (0, 1)):
        defines = {
            "FLOAT": 0,
            "ROUNDED": rounded,
            "SUMMED": summed,
            **geometry.row_defines(geometry.WIDEST),
        }
        found = compile_kernels("rounding_gradient.cu", tuple(sorted(defines.items())), target)
        assert not found.resources["lsq_round_gradient"].spill_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (7, 13), (41, 48)])
def test_add(shape, dtype):
    compare_cuda(Add(a=torch.randn(shape), b=torch.randn(shape), out=empty(*shape)), dtype)


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
def test_more_rows_than_a_warp_draws_words_for_at_a_time(columns, rows, monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: 1)
    gradient = torch.randn(rows * 33 + 1, columns)
    compare_cuda(
        RoundGradient(gradient=gradient, rounded=gradient_to_round(*gradient.shape)), exact=True
    )


@pytest.mark.parametrize("columns", [48, 1040])
def test_three_turns(columns, monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(2, turns)))
    turns(columns)
