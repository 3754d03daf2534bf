"""VocabularyLoss against fairseq's in float64, its gradient, padded words, blocks of rows."""

import dataclasses
import math

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from lsq.native import tiles
from lsq.ops import vocabulary_loss_cuda
from lsq.ops.vocabulary_loss import BLOCK_ROWS, Prediction, VocabularyLoss, VocabularyLossGradient
from lsq.program.values import Coded, RoundedGradient, Rows, Weight
from lsq.quant import GRADIENT, Format, Grain, quantize
from tests.ops.compare import (
    KEY,
    ROWS,
    assert_as_accurate,
    compare,
    empty,
    format_of,
    on_cpu,
    refused,
    written,
)
from tests.ops.cuda import DTYPES, compare_cuda, run
from tests.ops.products import multiplied
from tests.sampling import first

INNER, PADDING = 48, 1
WEIGHT = Format(name="weight", bits=8, grain=Grain.ROW)


def operands(rows: int, vocabulary: int, inner: int = INNER) -> tuple[torch.Tensor, ...]:
    """x, weight and targets, of which some are padding."""
    target = torch.randint(0, vocabulary, (rows,)).masked_fill(torch.arange(rows) % 5 == 3, PADDING)
    return torch.randn(rows, inner), 0.3 * torch.randn(vocabulary, inner), target


def loss_of(x: Rows, weight: Weight, target, vocabulary: int, smoothing: float) -> VocabularyLoss:
    """With the bound of its gradient, of codes."""
    prediction = Prediction(
        x=x,
        weight=weight,
        target=target,
        vocabulary=vocabulary,
        padding=PADDING,
        smoothing=smoothing,
    )
    rows, bound = empty(len(target)), empty(len(target)) if x.coded is not None else None
    losses = {"loss": empty(1), "nll": empty(1)}
    return VocabularyLoss(prediction=prediction, **losses, normaliser=rows, bound=bound)


def of_floats(x, weight, target, smoothing: float = 0.1) -> VocabularyLoss:
    """The losses of float logits; the weight has as many rows as there are words."""
    values = Weight(format=WEIGHT, values=weight)
    return loss_of(Rows(floats=x), values, target, len(weight), smoothing)


def of_codes(
    rows: int, vocabulary: int, padded: int, smoothing: float = 0.1, inner: int = INNER
) -> VocabularyLoss:
    """The losses of logits of codes."""
    x, weight, target = operands(rows, vocabulary, inner)
    codes, x_scale, _ = quantize(x, torch.tensor([2.0]))
    clip = torch.full((vocabulary,), 0.5) + 0.1 * torch.rand(vocabulary)
    weight_codes, scale, _ = quantize(weight, clip)
    beyond, pad = padded - vocabulary, torch.nn.functional.pad
    scale = pad(scale, (0, beyond), value=1.0)
    coded = Coded(format=format_of(), codes=codes, scale=x_scale)
    weight = Weight(format=WEIGHT, codes=pad(weight_codes, (0, 0, 0, beyond)), scale=scale)
    return loss_of(Rows(coded=coded), weight, target, vocabulary, smoothing)


def gradient_of(loss: VocabularyLoss, dloss: float = 2.0) -> VocabularyLossGradient:
    """The gradient of losses that were computed."""
    given = loss.prediction
    common = {"prediction": given, "normaliser": loss.normaliser, "dloss": torch.tensor([dloss])}
    return VocabularyLossGradient(**common, dlogits=empty(given.rows, given.columns))


def rounded_of(loss: VocabularyLoss, dloss: float = 2.0) -> VocabularyLossGradient:
    """The rounded gradient of losses of codes that were computed."""
    given = loss.prediction
    rounded = RoundedGradient(
        format=GRADIENT,
        codes=empty(given.rows, given.columns, dtype=torch.int8),
        scale=empty(given.rows),
        weight_scale=given.weight.scale,
        key=KEY,
        subsequence=3,
    )
    return dataclasses.replace(
        gradient_of(loss, dloss), dlogits=None, bound=loss.bound, rounded=rounded
    )


def by_fairseq(x, weight, target, smoothing, dtype):
    """loss, nll loss, gradient of the logits."""
    logits = (x.to(dtype) @ weight.to(dtype).t()).requires_grad_()
    probabilities = logits.log_softmax(-1)
    loss, nll = label_smoothed_nll_loss(probabilities, target, smoothing, ignore_index=PADDING)
    return loss.detach(), nll.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("rows", [*ROWS, BLOCK_ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_as_accurate_as_fairseqs(rows, smoothing):
    given = operands(rows, 91)
    found = compare(of_floats(*given, smoothing))
    gradient = compare(gradient_of(found, 1.0)).dlogits
    results = found.loss[0], found.nll[0], gradient
    assert_as_accurate(results, lambda dtype: by_fairseq(*given, smoothing, dtype))


@pytest.mark.parametrize("rows", [1, 41, 341])
@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (96, 96)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_codes_with_padded_words(rows, vocabulary, padded, smoothing, compared):
    operation = of_codes(rows, vocabulary, padded, smoothing)
    found = compared(operation)
    gradient = compared(gradient_of(found)).dlogits
    given = operation.prediction
    x, scale = given.x.coded.decode().double(), given.weight.scale
    weight = (given.weight.codes * scale[:, None].double())[:vocabulary]
    loss, nll, exact = by_fairseq(x, weight, given.target, smoothing, torch.float64)
    torch.testing.assert_close(found.loss[0].double(), loss, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.nll[0].double(), nll, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient[:, :vocabulary].double(), 2 * exact, rtol=1e-5, atol=1e-6)
    rounded = compared(rounded_of(found)).rounded
    codes = rounded.codes
    assert not gradient[:, vocabulary:].any() and not codes[:, vocabulary:].any()
    assert not codes[given.target == PADDING].any()
    step = rounded.scale[:, None] / scale[:vocabulary]
    assert ((codes[:, :vocabulary] * step - 2 * exact).abs() <= 1.001 * step + 1e-7).all()


@pytest.mark.parametrize("sharpness", first([0.01, 30.0, 0.0, 1.0], 2))
@pytest.mark.parametrize("smoothing", first([0.1, 0.0, 0.9], 1))
def test_the_bound_is_one_and_close(sharpness, smoothing, runs):
    """Where the largest gradient is the target's and where not."""
    operation = of_codes(341, 300, 304, smoothing)
    given = operation.prediction
    given.weight.scale[:300] *= 10 ** torch.linspace(-3, 1, 300)[torch.randperm(300)]
    given.x.coded.scale *= sharpness
    found = runs(operation)[0]
    gradient = on_cpu(gradient_of(found, 1.0)).dlogits * given.weight.scale
    largest = gradient.abs().amax(dim=1)
    error = 1 + 1e-5 + found.normaliser.abs() * 2**-22  # of exp(logit - normaliser)
    assert (largest <= found.bound * error).all()
    # Beyond the largest magnitude at most by what smoothing takes from every word.
    assert (found.bound <= largest * error + given.each * given.weight.scale[:300].max()).all()
    assert not found.bound[given.target == PADDING].any()


def test_a_certain_target_does_not_coarsen_the_others():
    """A certain target has a small gradient; its probability must not be the bound."""
    operation = of_codes(41, 33, 48, smoothing=0.0)
    given = operation.prediction
    given.x.coded.scale *= 4.0
    given.target.copy_(given.logits().argmax(dim=1)).clamp_(min=2)
    found = on_cpu(operation)
    largest = (on_cpu(gradient_of(found, 1.0)).dlogits * given.weight.scale).abs().amax(dim=1)
    torch.testing.assert_close(found.bound, largest, rtol=1e-4, atol=1e-7)


def test_a_gradient_goes_one_way():
    found = on_cpu(of_codes(7, 33, 48))
    with refused("give it one of these"):
        dataclasses.replace(rounded_of(found), bound=None)
    with refused("give it one of these"):
        dataclasses.replace(gradient_of(found), rounded=rounded_of(found).rounded)


def test_only_what_is_wanted_is_written(compared):
    operation = of_codes(41, 33, 48)
    whole = compared(operation)
    for unwanted in ({"bound": None}, {"bound": None, "normaliser": None}):
        found = compared(dataclasses.replace(operation, **unwanted))
        assert torch.equal(found.loss, whole.loss) and torch.equal(found.nll, whole.nll)


def test_words_that_fairseq_smooths():
    """The target keeps 1 - e - e', every word gets e', and all together weigh 1."""
    given = of_codes(1, 33, 48, smoothing=0.1).prediction
    assert given.target_weight + 33 * given.each == pytest.approx(1.0)
    assert given.each == pytest.approx(0.1 / 32)


def test_padding_counts_for_nothing(runs):
    x, weight, _ = operands(7, 33)
    x[2, 3] = math.nan
    for found in runs(of_floats(x, weight, torch.full((7,), PADDING))):
        assert found.loss == 0 and found.nll == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_loss_and_gradient(value, runs):
    x, weight, _ = operands(7, 33)
    x[2, 3] = value
    operation = of_floats(x, weight, torch.full((7,), 5))
    for found in runs(operation):
        assert found.loss.isnan() and found.nll.isnan()
        # the reference's normaliser is infinite where a logit is
        assert torch.equal(found.normaliser.isnan(), on_cpu(operation).normaliser.isnan())
        for gradient in runs(gradient_of(found)):
            bad = gradient.dlogits.isfinite().logical_not()
            assert gradient.dlogits[2].isnan().all() and bad.any(1).sum() == 1


@pytest.mark.parametrize("value", ["x", "weight"])
def test_a_poisoned_scale_reaches_loss_and_row_scales(value, compared):
    operation = of_codes(7, 33, 48)
    target = operation.prediction.target
    target[target == PADDING] = 5
    getattr(operation.prediction, value).scale[0] = math.nan
    found = compared(operation)
    rounded = compared(rounded_of(found)).rounded
    assert found.loss.isnan() and rounded.scale.isnan().all() and not rounded.codes.any()


def test_a_word_that_cannot_be(runs):
    """Logits of -infinity, in a vector of their own as well."""
    x, weight, target = operands(7, 96)
    words = [9, *range(16, 24)]
    target[:] = 4
    x[:, 0] = x[:, 0].abs() + 0.1
    weight[words] = 0.0
    weight[words, 0] = -math.inf
    expected = torch.nn.functional.cross_entropy(x @ weight.t(), target, reduction="sum")
    for found in runs(of_floats(x, weight, target, 0.0)):
        torch.testing.assert_close(found.nll[0], expected)
        for gradient in runs(gradient_of(found)):
            assert not gradient.dlogits[:, words].any()


def test_huge_logits(compared):
    x, weight, target = operands(41, 33)
    found = compared(of_floats(1e4 * x, weight, target))
    given = 1e4 * x, weight, target, 0.1
    assert_as_accurate([found.loss[0], found.nll[0]], lambda dtype: by_fairseq(*given, dtype)[:2])


def test_no_rows(compared):
    for operation in (of_codes(0, 33, 48), of_floats(*operands(0, 33))):
        found = compared(operation)
        assert found.loss == 0 and found.nll == 0
        compared(gradient_of(found) if found.bound is None else rounded_of(found))


@pytest.mark.parametrize("kernel", tiles.INSTRUCTIONS)
def test_every_kernel_finds_the_same_bits(kernel):
    """What is added up apart does not depend on the blocks of a product."""
    operation = of_codes(341, 1003, 1008)
    wanted = on_cpu(operation)
    expected = written(wanted), written(on_cpu(rounded_of(wanted)))
    for rows in (0, 32, 96):
        with multiplied(kernel, rows):
            loss = on_cpu(operation)
            found = written(loss), written(on_cpu(rounded_of(loss)))
        for one, other in zip(found, expected, strict=True):
            made = {name: tensor for name, tensor in one.items() if tensor is not None}
            assert all(torch.equal(tensor, other[name]) for name, tensor in made.items())


def test_limits_of_targets():
    """Padded words are no targets."""
    forward = on_cpu(of_codes(7, 33, 48))
    for operation in (forward, gradient_of(forward), rounded_of(forward)):
        assert operation.limits() == {"prediction.target": 33}


def compare_both(operation, dtype=torch.float32):
    """The losses, then their gradient: what the CUDA implementations made."""
    found = compare_cuda(operation, dtype)
    return found, compare_cuda(gradient_of(found), dtype)


@pytest.mark.slow
def test_many_words_on_cuda():
    found, _ = compare_both(of_codes(3, 4500, 4512))
    compare_cuda(rounded_of(found))
    compare_both(of_floats(*operands(3, 4500)))


def test_blocks_of_rows_of_floats_on_cuda(monkeypatch):
    monkeypatch.setattr(vocabulary_loss_cuda, "CUDA_BLOCK_ROWS", 16)
    compare_both(of_floats(*operands(41, 33)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [33, 96])
def test_floats_on_cuda(dtype, vocabulary):
    """The weight, a float32 parameter, is brought to the dtype of what it is multiplied with."""
    x, weight, target = operands(41, vocabulary)
    compare_both(of_floats(x, weight.to(dtype).float(), target), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_of_codes_in_half_precision_on_cuda(dtype):
    compare_cuda(gradient_of(compare_cuda(of_codes(41, 33, 48))), dtype)


@pytest.mark.parametrize("word", [-7, 33, 40, 10**12])
def test_a_target_outside_the_vocabulary_makes_the_losses_nan_on_cuda(word):
    operation = of_floats(*operands(7, 33))
    normaliser = on_cpu(operation).normaliser
    operation.prediction.target[2] = word
    found = run(operation)
    assert found.loss.isnan() and found.nll.isnan()
    torch.testing.assert_close(found.normaliser, normaliser)


def test_what_kernels_cannot_take_is_refused_on_cuda():
    with refused("outer width is 33; on CUDA it must be a multiple of 16"):
        run(of_codes(7, 33, 33))
    floats, bound = of_floats(*operands(7, 48)), of_codes(7, 48, 48).bound
    with refused("the gradient of float logits is not rounded"):
        run(dataclasses.replace(floats, bound=bound))
