"""VocabularyProjection against the float64 reference and fairseq's label-smoothed cross-entropy."""

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from lsq.config import QuantConfig
from lsq.layers import Embedding, VocabularyProjection
from tests.constants import quant_with
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
    check_loss(quant_with(**EXACT, **options))


@pytest.mark.parametrize(
    "vocabulary, rows, smoothing", [(2, 7, 0.0), (16, 1, 0.1), (33, 41, 0.0), (97, 341, 0.3)]
)
def test_odd_shapes(vocabulary, rows, smoothing):
    check_loss(quant_with(**EXACT), vocabulary=vocabulary, rows=rows, smoothing=smoothing)


@pytest.mark.parametrize("vocabulary", [16, 91])
def test_logits_equal_the_reference(vocabulary):
    quant = quant_with(**EXACT)
    compare_with_reference(
        VocabularyProjection(vocabulary, HIDDEN, quant=quant),
        only(quant),
        lambda layer, x: layer(x),
        lambda layer, x: torch.nn.functional.linear(
            layer.round(x, "input_clip"), layer.round(layer.parameters["weight"], "weight_clip")
        ),
        lambda: (torch.randn(7, 3, HIDDEN),),
    )


@pytest.mark.parametrize("quant", [FLOAT, QuantConfig()])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_logits_are_fairseqs(quant, smoothing):
    width = 19 if quant is FLOAT else HIDDEN
    projection = VocabularyProjection(91, width, quant=quant, padding_idx=PADDING).eval()
    x, target = torch.randn(7, 3, width, requires_grad=True), targets_of(21, 91).view(7, 3)
    loss, nll = projection.loss(x, target, smoothing)
    logits = x @ projection.weight.t() if quant is FLOAT else projection(x)
    logs = logits.log_softmax(-1).view(-1, 91)
    wanted = label_smoothed_nll_loss(logs, target.view(-1), smoothing, ignore_index=PADDING)
    torch.testing.assert_close((loss, nll), wanted)
    assert not nll.requires_grad
    if quant is FLOAT:
        torch.testing.assert_close(projection(x), logits, atol=1e-5, rtol=1e-5)
        leaves = [x, projection.weight]
        found, expected = (torch.autograd.grad(one, leaves) for one in (loss, wanted[0]))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_gradients_scale_with_the_loss(backward):
    """In int8 the logits' gradient is rounded before the upstream gradient is known."""
    quant = quant_with(**EXACT | {"backward": backward})
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
            quant=quant_with(backward=backward, calibration_passes=0),
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
    quant = quant_with(**EXACT | {"backward": backward})
    projection = VocabularyProjection(33, HIDDEN, quant=quant, padding_idx=PADDING)
    x = torch.randn(7, HIDDEN, requires_grad=True)
    target = torch.tensor([1, 5, 1, 1, 7, 1, 1])
    projection.loss(x, target, 0.1)[0].backward()
    assert torch.equal(x.grad.abs().sum(1) == 0, target == PADDING)
    loss, nll = projection.loss(x, torch.full((7,), PADDING), 0.1)
    assert loss == 0 and nll == 0


@pytest.mark.parametrize("mode", ["float", "int8"])
def test_large_logits_do_not_overflow_and_nan_reaches_the_loss(mode):
    projection = VocabularyProjection(33, 16, quant=QuantConfig(mode=mode), padding_idx=PADDING)
    x, target = 1e4 * torch.randn(7, 16), torch.arange(7) + 2
    loss, nll = projection.loss(x, target, 0.1)
    assert loss.isfinite() and loss > 1e3
    loss.backward()
    assert projection.weight.grad.isfinite().all()
    x[3, 4] = float("nan")
    assert all(one.isnan() for one in projection.loss(x, target))


def test_a_shared_weight_learns_from_both_and_is_rounded_again():
    embedding = Embedding(33, HIDDEN, PADDING)
    projection = VocabularyProjection(33, HIDDEN, weight=embedding.weight, padding_idx=PADDING)
    assert projection.weight is embedding.weight
    tokens = torch.tensor([[4, 5, 6]])
    x = embedding(tokens)
    projection.loss(x, tokens.t())[0].backward()
    both, embedding.weight.grad = embedding.weight.grad.clone(), None
    projection.loss(x.detach(), tokens.t())[0].backward()
    assert not torch.equal(embedding.weight.grad, both)
    with torch.no_grad():
        before = projection.eval()(x)
        state = {name: 0.5 * tensor for name, tensor in embedding.state_dict().items()}
        embedding.load_state_dict(state)
        assert not torch.equal(projection(x), before)


def test_refusals():
    projection, x = VocabularyProjection(33, 16, padding_idx=PADDING), torch.randn(2, 16)

    def loss(target, *smoothing):
        return lambda: projection.loss(x, torch.tensor(target), *smoothing)

    weight = torch.nn.Parameter(torch.zeros(32, 16))
    for call, message in (
        (loss([3, 33]), "targets lie between 3 and 33; the vocabulary has 33 words"),
        (loss([3, -100]), "targets lie between -100 and 3"),
        (loss([3, 4], 1.0), "label_smoothing is 1.0"),
        (loss([3, 4, 5]), r"the targets are \(3,\); they must be \(2,\)"),
        (lambda: projection(torch.randn(2, 24)), "24.*16"),
        (lambda: VocabularyProjection(33, 20), "hidden is 20.*use 32"),
        (lambda: VocabularyProjection(1, 16), "at least 2 words"),
        (
            lambda: VocabularyProjection(33, 16, weight=weight),
            r"weight is \(32, 16\).*\(33, 16\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
