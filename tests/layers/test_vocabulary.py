"""VocabularyProjection against the float64 reference and fairseq's label-smoothed cross-entropy."""

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from lsq.config import QuantConfig
from lsq.layers import Embedding, VocabularyProjection
from tests.layers.oracle import compare_with_reference, only, prepare
from tests.layers.reference import vocabulary_loss
from tests.layers.shapes import assert_unbiased, gradients

HIDDEN, PADDING = 48, 1
FLOAT = QuantConfig(mode="float")
EXACT = {"backward": "float", "calibration_passes": 0}
"""Nothing is random, and only the first pass measures."""


def targets_of(rows, vocabulary):
    """Random words, of which some are padding."""
    return torch.randint(0, vocabulary, (rows,)).masked_fill(torch.arange(rows) % 5 == 3, PADDING)


def check_loss(quant, *, vocabulary=91, rows=21, smoothing=0.1):
    target = targets_of(rows, vocabulary)

    def reference(layer, x):
        weight = {"weight": layer.round(layer.parameters["weight"], "weight_clip")}
        return vocabulary_loss(
            FLOAT, weight, layer.round(x, "input_clip"), target, PADDING, smoothing
        )[0]

    return compare_with_reference(
        VocabularyProjection(vocabulary, HIDDEN, quant=quant, padding_idx=PADDING),
        only(quant),
        lambda layer, x: layer.loss(x, target, smoothing)[0],
        reference,
        lambda: (torch.randn(rows, HIDDEN),),
    )


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [8, 4])
def test_loss_equals_the_reference(clip_gradient, granularity, bits):
    options = {"clip_gradient": clip_gradient, "weight_granularity": granularity, "bits": bits}
    check_loss(QuantConfig(**EXACT, **options))


@pytest.mark.parametrize(
    "vocabulary, rows, smoothing", [(2, 7, 0.0), (16, 1, 0.1), (33, 41, 0.0), (97, 341, 0.3)]
)
def test_odd_shapes(vocabulary, rows, smoothing):
    check_loss(QuantConfig(**EXACT), vocabulary=vocabulary, rows=rows, smoothing=smoothing)


@pytest.mark.parametrize("vocabulary", [16, 91])
def test_logits_equal_the_reference(vocabulary):
    quant = QuantConfig(**EXACT)
    compare_with_reference(
        VocabularyProjection(vocabulary, HIDDEN, quant=quant),
        only(quant),
        lambda layer, x: layer(x),
        lambda layer, x: torch.nn.functional.linear(
            layer.round(x, "input_clip"), layer.round(layer.parameters["weight"], "weight_clip")
        ),
        lambda: (torch.randn(7, 3, HIDDEN),),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_float_mode_equals_fairseq(smoothing):
    projection = VocabularyProjection(91, 19, quant=FLOAT, padding_idx=PADDING)
    x = torch.randn(7, 3, 19, requires_grad=True)
    target = targets_of(21, 91).view(7, 3)
    loss, nll = projection.loss(x, target, smoothing)
    logs = (x @ projection.weight.t()).log_softmax(-1).view(-1, 91)
    wanted, wanted_nll = label_smoothed_nll_loss(
        logs, target.view(-1), smoothing, ignore_index=PADDING
    )
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(nll, wanted_nll)
    assert not nll.requires_grad
    leaves = [x, projection.weight]
    for found, expected in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(projection(x), x @ projection.weight.t(), atol=1e-5, rtol=1e-5)


def test_loss_is_that_of_the_logits():
    projection = VocabularyProjection(91, HIDDEN, padding_idx=PADDING).eval()
    x, target = torch.randn(21, HIDDEN), targets_of(21, 91)
    with torch.no_grad():
        loss, nll = projection.loss(x, target, 0.1)
        logs = projection(x).log_softmax(-1)
    wanted, wanted_nll = label_smoothed_nll_loss(logs, target, 0.1, ignore_index=PADDING)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(nll, wanted_nll)


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_gradients_scale_with_the_loss(backward):
    """Under backward="int8" the gradient of the logits is rounded before the upstream gradient is
    known."""
    quant = QuantConfig(**EXACT | {"backward": backward})
    projection = VocabularyProjection(91, HIDDEN, quant=quant, padding_idx=PADDING)
    x, target = torch.randn(21, HIDDEN, requires_grad=True), targets_of(21, 91)
    found = []
    for factor in (1.0, 0.25):
        torch.manual_seed(1)
        (factor * projection.loss(x, target, 0.1)[0]).backward()
        found.append((x.grad, projection.weight.grad))
        x.grad = projection.weight.grad = None
    for once, scaled in zip(*found, strict=True):
        torch.testing.assert_close(0.25 * once, scaled, atol=1e-6, rtol=1e-4)


def test_int8_gradients_are_unbiased():
    x, target = torch.randn(7, HIDDEN, requires_grad=True), targets_of(7, 33)
    exact, rounded = (
        VocabularyProjection(
            33,
            HIDDEN,
            quant=QuantConfig(backward=backward, calibration_passes=0),
            padding_idx=PADDING,
        )
        for backward in ("float", "int8")
    )
    prepare(exact, lambda layer, x: layer.loss(x, target, 0.1)[0], (x,))
    rounded.load_state_dict(exact.state_dict())
    drawn = [gradients(rounded, rounded.loss(x, target, 0.1)[0], x) for _ in range(200)]
    assert_unbiased(gradients(exact, exact.loss(x, target, 0.1)[0], x), drawn)


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_padding_has_no_loss_and_no_gradient(backward):
    quant = QuantConfig(**EXACT | {"backward": backward})
    projection = VocabularyProjection(33, HIDDEN, quant=quant, padding_idx=PADDING)
    x = torch.randn(7, HIDDEN, requires_grad=True)
    target = torch.tensor([1, 5, 1, 1, 7, 1, 1])
    projection.loss(x, target, 0.1)[0].backward()
    assert torch.equal(x.grad.abs().sum(1) == 0, target == PADDING)
    loss, nll = projection.loss(x, torch.full((7,), PADDING), 0.1)
    assert loss == 0 and nll == 0


@pytest.mark.parametrize("mode", ["float", "int8"])
def test_large_logits_do_not_overflow(mode):
    projection = VocabularyProjection(33, 16, quant=QuantConfig(mode=mode))
    x = 1e4 * torch.randn(7, 16)
    loss, nll = projection.loss(x, torch.arange(7), 0.1)
    assert loss.isfinite() and loss > 1e3
    loss.backward()
    assert projection.weight.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["float", "int8"])
def test_nan_reaches_the_loss(mode):
    projection = VocabularyProjection(33, 16, quant=QuantConfig(mode=mode), padding_idx=PADDING)
    x = torch.randn(7, 16)
    projection.loss(x, torch.full((7,), 5))
    x[3, 4] = float("nan")
    loss, nll = projection.loss(x, torch.full((7,), 5))
    assert loss.isnan() and nll.isnan()


def test_a_shared_weight_learns_from_both():
    embedding = Embedding(33, HIDDEN, PADDING)
    projection = VocabularyProjection(33, HIDDEN, weight=embedding.weight, padding_idx=PADDING)
    assert projection.weight is embedding.weight
    tokens = torch.tensor([[4, 5, 6]])
    x = embedding(tokens)
    projection.loss(x, tokens.t())[0].backward()
    both = embedding.weight.grad.clone()
    embedding.weight.grad = None
    projection.loss(x.detach(), tokens.t())[0].backward()
    assert not torch.equal(embedding.weight.grad, both)


def test_a_shared_weight_that_changes_is_rounded_again():
    embedding = Embedding(33, HIDDEN, PADDING)
    projection = VocabularyProjection(
        33, HIDDEN, weight=embedding.weight, padding_idx=PADDING
    ).eval()
    x = torch.randn(7, HIDDEN)
    with torch.no_grad():
        before = projection(x)
        embedding.load_state_dict(
            {name: 0.5 * tensor for name, tensor in embedding.state_dict().items()}
        )
        assert not torch.equal(projection(x), before)


def test_refusals():
    projection = VocabularyProjection(33, 16, padding_idx=PADDING)
    x = torch.randn(2, 16)
    with pytest.raises(
        ValueError, match="targets lie between 3 and 33; the vocabulary has 33 words"
    ):
        projection.loss(x, torch.tensor([3, 33]))
    with pytest.raises(ValueError, match="targets lie between -100 and 3"):
        projection.loss(x, torch.tensor([3, -100]))
    with pytest.raises(ValueError, match="label_smoothing is 1.0"):
        projection.loss(x, torch.tensor([3, 4]), 1.0)
    with pytest.raises(ValueError, match=r"the targets are \(3,\); they must be \(2,\)"):
        projection.loss(x, torch.tensor([3, 4, 5]))
    with pytest.raises(ValueError, match="24.*16"):
        projection(torch.randn(2, 24))
    with pytest.raises(ValueError, match="hidden is 20.*use 32"):
        VocabularyProjection(33, 20)
    with pytest.raises(ValueError, match="at least 2 words"):
        VocabularyProjection(1, 16)
    with pytest.raises(ValueError, match=r"weight is \(32, 16\).*\(33, 16\)"):
        VocabularyProjection(33, 16, weight=torch.nn.Parameter(torch.zeros(32, 16)))
