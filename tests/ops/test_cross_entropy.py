"""vocabulary_cross_entropy against fairseq's loss in float64, with its gradient, padded words and blocks of rows."""

import math

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from lsq.config import QuantConfig
from lsq.ops.cross_entropy import BLOCK_ROWS, weights_of
from lsq.program import layers
from lsq.quant import quantize
from tests.ops.compare import KEY, assert_accurate, compare, compare_program, fused
from tests.ops.operands import ROWS

INNER, PADDING = 48, 1
NAME = "vocabulary_cross_entropy"


def case(rows, vocabulary):
    """x, weight and targets, of which some are padding."""
    target = torch.randint(0, vocabulary, (rows,)).masked_fill(torch.arange(rows) % 5 == 3, PADDING)
    return torch.randn(rows, INNER), 0.3 * torch.randn(vocabulary, INNER), target


def options_of(vocabulary, smoothing, stream=None):
    return {"vocabulary": vocabulary, "padding": PADDING, "smoothing": smoothing, "stream": stream}


def by_fairseq(x, weight, target, smoothing, dtype):
    """loss, nll loss, gradient of the logits."""
    logits = (x.to(dtype) @ weight.to(dtype).t()).requires_grad_()
    loss, nll = label_smoothed_nll_loss(logits.log_softmax(-1), target, smoothing, ignore_index=PADDING)
    return loss.detach(), nll.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocabulary", [33, 96])
@pytest.mark.parametrize("backward", ["float", "int8"])
def test_in_a_program(rows, vocabulary, backward):
    quantization = QuantConfig(backward=backward)
    program = layers.vocabulary_loss(quantization, rows, INNER, vocabulary, 96, PADDING, 0.1, True, True)
    other = "scale_rows" if backward == "int8" else NAME + "_gradient"
    assert {NAME, other} <= compare_program(program)


@pytest.mark.parametrize("rows", [*ROWS, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS - 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_as_accurate_as_fairseqs(rows, smoothing):
    x, weight, target = case(rows, 91)
    options = options_of(91, smoothing)
    loss, nll, normaliser, *_ = compare(NAME, x, None, weight, None, target, KEY, **options)
    (gradient,) = compare(NAME + "_gradient", x, None, weight, None, target, normaliser, torch.ones(1), **options)
    exact, single = (by_fairseq(x, weight, target, smoothing, dtype) for dtype in (torch.float64, torch.float32))
    for name, *values in zip(("loss", "nll", "gradient"), (loss[0], nll[0], gradient), exact, single, strict=True):
        assert_accurate(*values, name)


@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (96, 96)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_integers_with_padded_words(vocabulary, padded, smoothing):
    x, weight, target = case(41, vocabulary)
    x_codes, x_scale, _ = quantize(x, torch.tensor([2.0]))
    codes, scale, _ = quantize(weight, torch.tensor([0.5]))
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padded - vocabulary))
    scale = torch.nn.functional.pad(scale.expand(vocabulary), (0, padded - vocabulary), value=1.0)
    operands = (x_codes, x_scale, codes, scale, target)
    options = options_of(vocabulary, smoothing)
    loss, nll, normaliser, *_ = compare(NAME, *operands, KEY, **options)
    (gradient,) = compare(NAME + "_gradient", *operands, normaliser, torch.tensor([2.0]), **options)
    exact = by_fairseq(
        x_codes.double() * x_scale.double(), codes[:vocabulary] * scale[:vocabulary, None].double(), target, smoothing,
        torch.float64,
    )
    torch.testing.assert_close(loss[0].double(), exact[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(nll[0].double(), exact[1], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient[:, :vocabulary].double(), 2 * exact[2], rtol=1e-5, atol=1e-6)
    assert not gradient[:, vocabulary:].any()
    *_, rounded, row_scale = compare(NAME, *operands, KEY, **options_of(vocabulary, smoothing, stream=3))
    assert not rounded[:, vocabulary:].any() and not rounded[target == PADDING].any()
    step = row_scale[:, None] / scale[:vocabulary]
    assert ((rounded[:, :vocabulary] * step - exact[2]).abs() <= 1.001 * step + 1e-7).all()


def test_words_that_fairseq_smooths():
    """The target keeps 1 - e - e', every word gets e', and all together weigh 1."""
    target, each = weights_of(33, 0.1)
    assert target + 33 * each == pytest.approx(1.0)
    assert each == pytest.approx(0.1 / 32)


def test_padding_counts_for_nothing():
    x, weight, _ = case(7, 33)
    target = torch.full((7,), PADDING)
    x[2, 3] = math.nan
    loss, nll, *_ = fused(NAME, x, None, weight, None, target, KEY, **options_of(33, 0.1))
    assert loss == 0 and nll == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_loss_and_gradient(value):
    x, weight, _ = case(7, 33)
    target = torch.full((7,), 5)
    x[2, 3] = value
    options = options_of(33, 0.1)
    loss, nll, normaliser, *_ = fused(NAME, x, None, weight, None, target, KEY, **options)
    assert loss.isnan() and nll.isnan()
    (gradient,) = fused(NAME + "_gradient", x, None, weight, None, target, normaliser, torch.ones(1), **options)
    assert gradient[2].isnan().all() and gradient[[0, 1, 3]].isfinite().all()


def test_a_word_that_cannot_be():
    """Logits of -infinity: probability and gradient 0, the loss of the others untouched."""
    x, weight, target = case(7, 33)
    target[:] = 4
    x[:, 0] = x[:, 0].abs() + 0.1
    weight[9] = 0.0
    weight[9, 0] = -math.inf
    options = options_of(33, 0.0)
    logits = x @ weight.t()
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
    _, nll, normaliser, *_ = fused(NAME, x, None, weight, None, target, KEY, **options)
    torch.testing.assert_close(nll[0], expected)
    (gradient,) = fused(NAME + "_gradient", x, None, weight, None, target, normaliser, torch.ones(1), **options)
    assert not gradient[:, 9].any()


def test_huge_logits():
    x, weight, target = case(41, 33)
    loss, nll, *_ = compare(NAME, 1e4 * x, None, weight, None, target, KEY, **options_of(33, 0.1))
    exact, single = (by_fairseq(1e4 * x, weight, target, 0.1, dtype) for dtype in (torch.float64, torch.float32))
    assert_accurate(loss[0], exact[0], single[0])
    assert_accurate(nll[0], exact[1], single[1])


def test_scale_rows():
    (scaled,) = compare("scale_rows", torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-0.5]))
    assert scaled.tolist() == [-0.5, -1.0, -1.5]
