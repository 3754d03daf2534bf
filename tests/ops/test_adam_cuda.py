"""Adam on CUDA: tails, tiles, NaN, and memory that is its own result."""

import math

import pytest
import torch

from tests.ops import adam_checks, cuda
from tests.ops.adam_checks import codes_of, in_place, numbers, state, step
from tests.ops.compare import on_cpu, written
from tests.ops.cuda import compare_cuda


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4,), (1023,), (1025,), (2049,), (7, 5)])
def test_parameters_without_codes(shape):
    assert compare_cuda(step(state(*shape), numbers())).rounded is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape, rows", adam_checks.SHAPES)
def test_codes_are_those_of_the_new_weight(bits, per_channel, shape, rows):
    adam_checks.check_codes(compare_cuda, bits, per_channel, shape, rows)


@pytest.mark.parametrize("shape, rows", adam_checks.SHAPES)
def test_rows_under_their_largest_magnitudes(shape, rows):
    adam_checks.check_largest_clips(compare_cuda, shape, rows)


def test_without_transposed_codes():
    adam_checks.check_no_transposed_codes(compare_cuda)


@pytest.mark.parametrize("clips", [1, 48])
def test_a_gradient_that_is_not_finite_shows(clips):
    adam_checks.check_gradient_that_is_not_finite(compare_cuda, clips)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_shows(factor):
    adam_checks.check_factor_that_is_not_finite(compare_cuda, factor)


def test_an_infinite_gradient_is_not_hidden_by_a_factor_of_zero():
    adam_checks.check_infinity_times_zero(compare_cuda)


@pytest.mark.parametrize("shape", [(5,), (48, 48)])
def test_in_place(shape):
    operation = step(
        state(*shape), numbers(), codes_of(torch.ones(48), shape) if len(shape) > 1 else None
    )
    expected = written(on_cpu(operation))
    target = cuda.current_device()
    placed = in_place(operation).bind(
        lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=target.place)
    )
    for ours, given in zip(placed.inputs, operation.inputs, strict=True):
        ours.copy_(given)
    target.run(in_place(placed).cuda())
    for name, found in written(in_place(placed)).items():
        if found is not None:
            wanted = expected[name]
            torch.testing.assert_close(
                found.cpu(), wanted, rtol=1e-6, atol=1e-6 if wanted.is_floating_point() else 1
            )


def test_sizes_that_no_product_takes_are_refused():
    with pytest.raises(
        ValueError, match="rows of a weight whose codes are transposed is 33.*multiple of 16"
    ):
        compare_cuda(
            step(state(33, 48), numbers(), codes_of(torch.ones(33), (33, 48)), transposed=True)
        )
    with pytest.raises(ValueError, match="width of a weight is 40"):
        compare_cuda(step(state(16, 40), numbers(), codes_of(torch.ones(16), (16, 40))))
