"""adam on CUDA: tails, tiles, NaN, and memory that is its own result."""

import math

import pytest
import torch

from lsq.ops import adam
from lsq.quant import quantize
from tests.ops import cuda
from tests.ops.compare import fused
from tests.ops.cuda import compare_cuda
from tests.ops.test_adam import numbers, state


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4,), (1023,), (1025,), (2049,), (7, 5)])
def test_parameters_without_codes(shape):
    *_, codes, transposed, scale = compare_cuda("adam", *state(*shape), numbers(), None)
    assert codes is transposed is scale is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape, rows", [((16, 48), None), ((48, 144), None), ((33, 144), 48)])
def test_codes_are_those_of_the_new_weight(bits, per_channel, shape, rows):
    clip = 0.5 + torch.rand(shape[0] if per_channel else 1)
    inputs = *state(*shape), numbers(), clip
    weight, _, _, codes, transposed, scale = compare_cuda("adam", *inputs, bits=bits, rows=rows)
    wanted = quantize(weight, clip, bits)
    assert torch.equal(codes[: shape[0]], wanted.codes) and torch.equal(transposed, codes.t())
    assert torch.equal(scale[: shape[0]], wanted.scale.expand(shape[0]))
    assert not codes[shape[0] :].any() and (scale[shape[0] :] == 1).all()


def test_without_transposed_codes():
    *_, transposed, _ = compare_cuda("adam", *state(33, 48), numbers(), torch.ones(33), transposed=False)
    assert transposed is None


@pytest.mark.parametrize("clips", [1, 48])
def test_a_gradient_that_is_not_finite_shows(clips):
    weight, gradient, first, second = state(48, 144)
    gradient[3, 2], gradient[40, 143], gradient[41, 0] = math.nan, math.inf, -math.inf
    weight, *_, scale = compare_cuda("adam", weight, gradient, first, second, numbers(), torch.ones(clips))
    assert weight.isnan().nonzero().tolist() == [[3, 2], [40, 143], [41, 0]]
    assert scale.isnan().nonzero().flatten().tolist() == ([3, 40, 41] if clips == 48 else list(range(48)))


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_shows(factor):
    weight, *_, scale = compare_cuda("adam", *state(16, 48), numbers(factor=factor), torch.ones(16))
    assert weight.isnan().all() and scale.isnan().all()
    weight, *_ = compare_cuda("adam", *state(7), numbers(factor=factor), None)
    assert weight.isnan().all()


def test_an_infinite_gradient_is_not_hidden_by_a_factor_of_zero():
    weight, gradient, first, second = state(7)
    gradient[3] = math.inf
    weight, *_ = compare_cuda("adam", weight, gradient, first, second, numbers(factor=0.0), None)
    assert weight.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("shape", [(5,), (48, 48)])
def test_in_place(shape):
    inputs = *state(*shape), numbers(), torch.ones(48) if len(shape) > 1 else None
    expected = fused("adam", *inputs)
    target = cuda.current_device()
    placed = [None if tensor is None else tensor.to(target.place) for tensor in inputs]
    codes = [None if wanted is None else torch.empty_like(wanted, device=target.place) for wanted in expected[3:]]
    outputs = [placed[0], *placed[2:4], *codes]
    target.run(adam.cuda(*placed, *outputs))
    for found, wanted in zip(outputs, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6 if wanted.is_floating_point() else 1)


def test_sizes_that_no_product_takes_are_refused():
    with pytest.raises(ValueError, match="rows of a weight whose codes are transposed is 33.*multiple of 16"):
        compare_cuda("adam", *state(33, 48), numbers(), torch.ones(33))
    with pytest.raises(ValueError, match="width of a weight is 40"):
        compare_cuda("adam", *state(16, 40), numbers(), torch.ones(16))
