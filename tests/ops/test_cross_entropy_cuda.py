"""vocabulary_cross_entropy on CUDA: kernels and products in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq.ops import cross_entropy, registry
from lsq.quant import quantize
from tests.ops.compare import KEY, fused
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_cross_entropy import NAME, PADDING, case, options_of


def integers(rows, vocabulary, padded):
    """x codes and scale, weight codes and scale [P], target."""
    x, weight, target = case(rows, vocabulary)
    x_codes, x_scale, _ = quantize(x, torch.tensor([2.0]))
    codes, scale, _ = quantize(weight, torch.full((vocabulary,), 0.5) + 0.1 * torch.rand(vocabulary))
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padded - vocabulary))
    return x_codes, x_scale, codes, torch.nn.functional.pad(scale, (0, padded - vocabulary), value=1.0), target


def compare_gradient(operands, normaliser, options, dtype=torch.float32):
    (found,) = compare_cuda(
        NAME + "_gradient", *operands, normaliser, torch.tensor([2.0]), dtype=dtype, floats=(0,), **options
    )
    return found


@pytest.mark.parametrize("rows", [1, 7, 41])
@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (96, 96)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_integers(rows, vocabulary, padded, smoothing):
    operands = integers(rows, vocabulary, padded)
    options = options_of(vocabulary, smoothing, stream=3)
    *_, normaliser, codes, _ = compare_cuda(NAME, *operands, KEY, **options)
    assert not codes[:, vocabulary:].any() and not codes[operands[-1] == PADDING].any()
    gradient = compare_gradient(operands, normaliser, options)
    assert not gradient[:, vocabulary:].any()


@pytest.mark.parametrize("unwanted", [(2,), (3, 4), (2, 3, 4)])
def test_outputs_that_nobody_wants(unwanted):
    compare_cuda(NAME, *integers(41, 33, 48), KEY, unwanted=unwanted, **options_of(33, 0.1, stream=3))


def test_rows_longer_than_a_block():
    operands = integers(3, 4500, 4512)
    options = options_of(4500, 0.1, stream=3)
    *_, normaliser, _, _ = compare_cuda(NAME, *operands, KEY, **options)
    compare_gradient(operands, normaliser, options)


@pytest.mark.parametrize("sharpness", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_largest_gradient_is_found(sharpness, smoothing):
    """Where it is the target's and where it is not: even and peaked distributions, little and much smoothing."""
    x, x_scale, weight, scale, target = integers(41, 33, 48)
    scale[:33] *= 10 ** torch.linspace(-3, 1, 33)[torch.randperm(33)]
    operands, options = (x, sharpness * x_scale, weight, scale, target, KEY), options_of(33, smoothing, stream=3)
    *_, row_scale = compare_cuda(NAME, *operands, **options)
    *_, wanted = fused(NAME, *operands, **options)
    torch.testing.assert_close(row_scale, wanted, rtol=3e-6, atol=0)


def test_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CUDA_BLOCK_ROWS", 16)
    operands = integers(41, 33, 48)
    options = options_of(33, 0.1, stream=3)
    *_, normaliser, _, _ = compare_cuda(NAME, *operands, KEY, **options)
    compare_gradient(operands, normaliser, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [33, 96])
def test_floats(dtype, vocabulary):
    x, weight, target = case(41, vocabulary)
    operands = (x.to(dtype), None, weight.to(dtype), None, target)
    options = options_of(vocabulary, 0.1)
    *_, normaliser, _, _ = compare_cuda(NAME, *operands, KEY, dtype=dtype, **options)
    compare_gradient(operands, normaliser, options, dtype)


def test_a_weight_of_another_dtype():
    x, weight, target = case(7, 33)
    x = x.bfloat16()
    weight = weight.bfloat16().float()
    operands, options = (x, None, weight, None, target), options_of(33, 0.1)
    *_, normaliser, _, _ = compare_cuda(NAME, *operands, KEY, dtype=x.dtype, **options)
    compare_gradient(operands, normaliser, options, x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_integers_in_half_precision(dtype):
    operands = integers(41, 33, 48)
    options = options_of(33, 0.1)
    *_, normaliser, _, _ = compare_cuda(NAME, *operands, KEY, **options)
    compare_gradient(operands, normaliser, options, dtype)


def test_huge_logits():
    x, weight, target = case(41, 33)
    compare_cuda(NAME, 1e4 * x, None, weight, None, target, KEY, **options_of(33, 0.1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_loss_and_gradient(value):
    x, weight, target = case(7, 33)
    target[2] = 5
    x[2, 3] = value
    definition, options = registry.definition(NAME), options_of(33, 0.1)
    operands = (x, None, weight, None, target, KEY)
    # The CPU's are the places that count: where a logit is infinite, the reference's normaliser is too, not NaN.
    wanted = fused(NAME, *operands, **options)
    loss, nll, normaliser, *_ = run(definition, operands, wanted, torch.float32, (), (), options)
    assert loss.isnan() and nll.isnan()
    assert torch.equal(normaliser.isnan(), wanted[2].isnan())
    assert compare_gradient(operands[:-1], normaliser, options)[2].isnan().all()


@pytest.mark.parametrize("poisoned", ["x_scale", "weight_scale"])
def test_a_poisoned_scale_reaches_loss_and_row_scales(poisoned):
    x, x_scale, weight, scale, target = integers(7, 33, 48)
    (x_scale if poisoned == "x_scale" else scale)[0] = math.nan
    target[target == PADDING] = 5
    loss, _, _, codes, row_scale = compare_cuda(
        NAME, x, x_scale, weight, scale, target, KEY, **options_of(33, 0.1, stream=3)
    )
    assert loss.isnan() and row_scale.isnan().all() and not codes.any()


def test_a_word_that_cannot_be():
    """Logits of -infinity, in a vector of their own as well."""
    x, weight, target = case(7, 96)
    target[:] = 4
    x[:, 0] = x[:, 0].abs() + 0.1
    weight[[9, *range(16, 24)]] = 0.0
    weight[[9, *range(16, 24)], 0] = -math.inf
    operands = (x, None, weight, None, target)
    _, nll, normaliser, *_ = compare_cuda(NAME, *operands, KEY, **options_of(96, 0.0))
    assert nll.isfinite()
    assert not compare_gradient(operands, normaliser, options_of(96, 0.0))[:, 16:24].any()


@pytest.mark.parametrize("word", [-7, 33, 40, 10**12])
def test_a_target_outside_the_vocabulary_makes_the_losses_nan(word):
    x, weight, target = case(7, 33)
    definition = registry.definition(NAME)
    operands, options = (x, None, weight, None, target, KEY), options_of(33, 0.1)
    expected = definition.reference(*operands, **options)
    target[2] = word
    loss, nll, normaliser, *_ = run(definition, operands, expected, torch.float32, (), (), options)
    assert loss.isnan() and nll.isnan()
    torch.testing.assert_close(normaliser, expected[2])


def test_all_padding():
    x, weight, target = case(7, 33)
    target[:] = PADDING
    loss, nll, *_ = compare_cuda(NAME, x, None, weight, None, target, KEY, **options_of(33, 0.1))
    assert loss == 0 and nll == 0


def test_no_rows():
    operands = integers(0, 33, 48)
    loss, nll, normaliser, *_ = compare_cuda(NAME, *operands, KEY, **options_of(33, 0.1, stream=3))
    assert loss == 0 and nll == 0
    compare_gradient(operands, normaliser, options_of(33, 0.1))
    compare_cuda("scale_rows", torch.empty(0), torch.tensor([2.0]))


@pytest.mark.parametrize("rows", [1, 341])
def test_scale_rows(rows):
    compare_cuda("scale_rows", torch.randn(rows), torch.tensor([-0.5]))
