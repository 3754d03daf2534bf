"""What targets add to both gradients of a vocabulary's loss, and what rounding then leaves of these gradients."""

import dataclasses

import pytest
import torch

from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.target_gradient import TargetInputGradient, TargetWeightGradient
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.values import Weight
from tests.ops.compare import KEY, compare, empty, on_cpu
from tests.ops.test_vocabulary_loss import PADDING, by_fairseq, of_codes, rounded_of

DLOSS = torch.tensor([0.5])


def losses(rows: int, vocabulary: int, padded: int, inner: int = 48, **options):
    """VocabularyLoss of codes whose targets' gradients stay floats."""
    loss = of_codes(rows, vocabulary, padded, inner=inner, **options)
    return dataclasses.replace(loss, target_gradient=empty(rows))


def input_gradient(loss) -> TargetInputGradient:
    given = loss.prediction
    return TargetInputGradient(
        prediction=given, target_gradient=loss.target_gradient, dloss=DLOSS, dx=empty(*given.x.tensor.shape)
    )


def weight_gradient(loss, *, clips: int | None = None, dtype: torch.dtype = torch.float32) -> TargetWeightGradient:
    """Of a weight some of which lies beyond its clip. `clips`: of it; None: one for each word."""
    given, words = loss.prediction, loss.prediction.vocabulary
    values = torch.randn(words, given.x.tensor.shape[1])
    clip = torch.full((clips or words,), 1.5) + 0.2 * torch.rand(clips or words)
    weight = Weight(
        format=given.weight.format, codes=given.weight.codes, scale=given.weight.scale, values=values.to(dtype),
        clip=clip,
    )  # fmt: skip
    return TargetWeightGradient(
        prediction=given, target_gradient=loss.target_gradient, dloss=DLOSS, weight=weight,
        others=torch.randn(values.shape).to(dtype), dweight=empty(*values.shape, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 41, 341])
@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (1003, 1008)])
def test_both_gradients(rows, vocabulary, padded):
    found = compare(losses(rows, vocabulary, padded))
    dx = compare(input_gradient(found)).dx
    assert not dx[found.prediction.target == PADDING].any()
    compare(weight_gradient(found))
    compare(weight_gradient(found, clips=1))


def test_bfloat16_weights_are_rounded_once():
    """The occurrences of a word are added as float32."""
    found = on_cpu(losses(341, 2, 16))
    compare(weight_gradient(found, dtype=torch.bfloat16))


def test_sums_are_added_to_what_is_there():
    operation = weight_gradient(on_cpu(losses(41, 33, 48)))
    apart = on_cpu(operation).dweight
    on_cpu(dataclasses.replace(operation, dweight=operation.others))
    assert torch.equal(operation.others, apart)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_codes_and_bound_are_without_the_target(smoothing):
    with_target = of_codes(341, 33, 48, smoothing=smoothing)
    loss = dataclasses.replace(with_target, target_gradient=empty(341))
    found, other = compare(loss), on_cpu(with_target)
    own = (found.target_gradient * found.prediction.weight.scale[found.prediction.target]).abs()
    torch.testing.assert_close(found.bound.maximum(own), other.bound)
    rounded = compare(dataclasses.replace(rounded_of(found), without_target=True)).rounded
    assert not rounded.codes[torch.arange(341), found.prediction.target].any()
    assert rounded.codes.any(dim=1).sum() > 200


def test_padding_has_no_gradient():
    loss = losses(7, 33, 48)
    loss.prediction.target[:] = PADDING
    found = compare(loss)
    assert not found.target_gradient.any() and not found.bound.any()
    operation = weight_gradient(found)
    assert torch.equal(compare(operation).dweight, operation.others)


def gradients(loss, split: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dweight of codes by all operations of a backward pass; `split`: the target is no code."""
    given = loss.prediction
    found = on_cpu(loss if split else dataclasses.replace(loss, target_gradient=None))
    rounded = on_cpu(dataclasses.replace(rounded_of(found, 0.5), without_target=split)).rounded
    joined = on_cpu(input_gradient(found)).dx if split else None
    dx = on_cpu(
        ProjectInputGradient(
            gradient=rounded, weight=given.weight, joined=joined, dx=empty(*given.x.tensor.shape)
        )
    ).dx  # fmt: skip
    whole = weight_gradient(found) if split else None
    values = torch.zeros(given.vocabulary, given.x.tensor.shape[1])
    weight = dataclasses.replace(given.weight, values=values, clip=torch.ones(len(values)))
    dweight = on_cpu(
        ProjectWeightGradient(
            gradient=rounded, x=given.x, weight=weight, key=KEY, subsequence=9, dweight=empty(*values.shape),
            dclip=empty(len(values)),
        )
    ).dweight  # fmt: skip
    if split:
        whole.others, whole.weight = dweight, weight
        dweight = on_cpu(whole).dweight
    return dx, dweight


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of signal to noise."""
    return 10 * torch.log10(exact.square().sum() / (found - exact).square().sum()).item()


@pytest.mark.parametrize("vocabulary, sure", [(2, False), (300, False), (4000, False), (300, True)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_noise(vocabulary, sure, smoothing):
    """Both gradients against float64: no worse than 38 dB where no word but the target is likely."""
    torch.manual_seed(5)
    padded = -(-vocabulary // 16) * 16
    loss = losses(341, vocabulary, padded, smoothing=smoothing)
    given = loss.prediction
    given.x.coded.scale *= 0.3
    if sure:
        given.target.copy_(given.logits().argmax(dim=1))
    x, weight = given.x.coded.decode().double(), given.weight.codes * given.weight.scale[:, None].double()
    weight = weight[:vocabulary]
    _, _, exact = by_fairseq(x, weight, given.target, smoothing, torch.float64)
    wanted = 0.5 * (exact @ weight), 0.5 * (exact.t() @ x)
    split = [decibels(*pair) for pair in zip(gradients(loss, True), wanted, strict=True)]
    assert min(split) > 38, split
    if vocabulary > 2:
        row = [decibels(*pair) for pair in zip(gradients(loss, False), wanted, strict=True)]
        assert min(mine - other for mine, other in zip(split, row, strict=True)) > 5, (split, row)
