"""VocabularyLoss on CUDA: kernels and products in the emulator, or on a GPU."""

import dataclasses
import math

import pytest
import torch

from lsq.native import compiler
from lsq.ops import vocabulary_loss_cuda
from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, compare_cuda, run
from tests.ops.test_vocabulary_loss import (
    PADDING,
    gradient_of,
    of_codes,
    of_floats,
    operands,
    rounded_of,
)


def compare_both(operation, dtype=torch.float32):
    """The losses, then their gradient: what the CUDA implementations made."""
    found = compare_cuda(operation, dtype)
    return found, compare_cuda(gradient_of(found), dtype)


@pytest.mark.parametrize("rows", [1, 7, 41])
@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (96, 96)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_codes(rows, vocabulary, padded, smoothing):
    operation = of_codes(rows, vocabulary, padded, smoothing)
    found, gradient = compare_both(operation)
    codes = compare_cuda(rounded_of(found)).rounded.codes
    assert (
        not codes[:, vocabulary:].any() and not codes[operation.prediction.target == PADDING].any()
    )
    assert not gradient.dlogits[:, vocabulary:].any()


@pytest.mark.parametrize("unwanted", [("bound",), ("bound", "normaliser")])
def test_only_what_is_wanted_is_written(unwanted):
    compare_cuda(dataclasses.replace(of_codes(41, 33, 48), **dict.fromkeys(unwanted)))


@pytest.mark.thorough
def test_many_words():
    found, _ = compare_both(of_codes(3, 4500, 4512))
    compare_cuda(rounded_of(found))
    compare_both(of_floats(*operands(3, 4500)))


@pytest.mark.parametrize("sharpness", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_bound_is_that_of_the_cpu(sharpness, smoothing):
    """Where it is the target's and where it is not: even and peaked distributions, little and much
    smoothing."""
    operation = of_codes(41, 33, 48, smoothing)
    operation.prediction.weight.scale[:33] *= 10 ** torch.linspace(-3, 1, 33)[torch.randperm(33)]
    operation.prediction.x.coded.scale *= sharpness
    found, wanted = compare_cuda(operation), on_cpu(operation)
    error = 1e-5 + found.normaliser.abs().max().item() * 2**-22  # of exp(logit - normaliser)
    torch.testing.assert_close(found.bound, wanted.bound, rtol=error, atol=1e-9)


def test_blocks_of_rows_of_floats(monkeypatch):
    monkeypatch.setattr(vocabulary_loss_cuda, "CUDA_BLOCK_ROWS", 16)
    compare_both(of_floats(*operands(41, 33)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [33, 96])
def test_floats(dtype, vocabulary):
    """The weight, a float32 parameter, is brought to the dtype of what it is multiplied with."""
    x, weight, target = operands(41, vocabulary)
    compare_both(of_floats(x, weight.to(dtype).float(), target), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_of_codes_in_half_precision(dtype):
    compare_cuda(gradient_of(compare_cuda(of_codes(41, 33, 48))), dtype)


def test_huge_logits():
    x, weight, target = operands(41, 33)
    compare_cuda(of_floats(1e4 * x, weight, target))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_loss_and_gradient(value):
    x, weight, target = operands(7, 33)
    target[2] = 5
    x[2, 3] = value
    operation = of_floats(x, weight, target)
    found = run(operation)
    assert found.loss.isnan() and found.nll.isnan()
    # The CPU's are the places that count: where a logit is infinite, the reference's normaliser is
    # too, not NaN.
    assert torch.equal(found.normaliser.isnan(), on_cpu(operation).normaliser.isnan())
    assert compare_cuda(gradient_of(found)).dlogits[2].isnan().all()


@pytest.mark.parametrize("value", ["x", "weight"])
def test_a_poisoned_scale_reaches_loss_and_row_scales(value):
    operation = of_codes(7, 33, 48)
    target = operation.prediction.target
    target[target == PADDING] = 5
    getattr(operation.prediction, value).scale[0] = math.nan
    found = compare_cuda(operation)
    rounded = compare_cuda(rounded_of(found)).rounded
    assert found.loss.isnan() and rounded.scale.isnan().all() and not rounded.codes.any()


def test_a_word_that_cannot_be():
    """Logits of -infinity, in a vector of their own as well."""
    x, weight, target = operands(7, 96)
    target[:] = 4
    x[:, 0] = x[:, 0].abs() + 0.1
    weight[[9, *range(16, 24)]] = 0.0
    weight[[9, *range(16, 24)], 0] = -math.inf
    found, gradient = compare_both(of_floats(x, weight, target, 0.0))
    assert found.nll.isfinite() and not gradient.dlogits[:, 16:24].any()


@pytest.mark.parametrize("word", [-7, 33, 40, 10**12])
def test_a_target_outside_the_vocabulary_makes_the_losses_nan(word):
    operation = of_floats(*operands(7, 33))
    normaliser = on_cpu(operation).normaliser
    operation.prediction.target[2] = word
    found = run(operation)
    assert found.loss.isnan() and found.nll.isnan()
    torch.testing.assert_close(found.normaliser, normaliser)


def test_all_padding():
    x, weight, _ = operands(7, 33)
    found = compare_cuda(of_floats(x, weight, torch.full((7,), PADDING)))
    assert found.loss == 0 and found.nll == 0


def test_no_rows():
    found, _ = compare_both(of_codes(0, 33, 48))
    compare_cuda(rounded_of(found))
    assert found.loss == 0 and found.nll == 0


def test_what_kernels_cannot_take_is_refused():
    with pytest.raises(ValueError, match="outer width is 33; on CUDA it must be a multiple of 16"):
        run(of_codes(7, 33, 33))
    floats, bound = of_floats(*operands(7, 48)), of_codes(7, 48, 48).bound
    with pytest.raises(ValueError, match="the gradient of float logits is not rounded"):
        run(dataclasses.replace(floats, bound=bound))


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    "source, defines",
    [("vocabulary_loss.cu", (("FLOAT", 1), ("ROW_THREADS", 512))), ("vocabulary_sums.cu", ())],
)
def test_kernels_compile_without_spills(target, source, defines):
    found = compiler.compile_kernels(source, defines, target).resources
    assert len(found) == 2 and not any(taken.spill_bytes for taken in found.values())
