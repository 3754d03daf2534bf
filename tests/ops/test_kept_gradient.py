"""What kept words add to both gradients of a loss, and what rounding leaves of these."""

import dataclasses

import pytest
import torch

from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.vocabulary_loss import KeptInputGradient, KeptWeightGradient, KeptWords
from lsq.ops.weight_gradient import ProjectWeightGradient
from tests.ops.compare import KEY, compare, empty, on_cpu
from tests.ops.cuda import DTYPES, compare_cuda, run
from tests.ops.test_vocabulary_loss import PADDING, by_fairseq, of_codes, rounded_of
from tests.ops.tiles import launches, names

DLOSS = torch.tensor([0.5])


def losses(rows: int, vocabulary: int, padded: int, **options):
    """VocabularyLoss of codes, two words of each row of which stay floats."""
    kept = KeptWords(likeliest=empty(rows, dtype=torch.int64), gradient=empty(2, rows))
    return dataclasses.replace(of_codes(rows, vocabulary, padded, **options), kept=kept)


def rounded_rest(loss, dloss: float = 2.0):
    """The gradient of losses that were computed, with codes of all but the kept words."""
    return dataclasses.replace(rounded_of(loss, dloss), kept=loss.kept)


def input_gradient(loss) -> KeptInputGradient:
    given = loss.prediction
    return KeptInputGradient(
        prediction=given, kept=loss.kept, dloss=DLOSS, dx=empty(*given.x.tensor.shape)
    )


def weight_gradient(
    loss, *, clips: int | None = None, dtype: torch.dtype = torch.float32
) -> KeptWeightGradient:
    """Of a weight some of which lies beyond its clip. `clips`: of it; None: one for each word."""
    given, words = loss.prediction, loss.prediction.vocabulary
    values = torch.randn(words, given.x.tensor.shape[1])
    clip = torch.full((clips or words,), 1.5) + 0.2 * torch.rand(clips or words)
    weight = dataclasses.replace(given.weight, values=values.to(dtype), clip=clip)
    return KeptWeightGradient(
        prediction=given,
        kept=loss.kept,
        dloss=DLOSS,
        weight=weight,
        others=torch.randn(values.shape).to(dtype),
        dweight=empty(*values.shape, dtype=dtype),
    )


@pytest.mark.parametrize("rows", [0, 1, 41, 341])
@pytest.mark.parametrize(
    "vocabulary, padded, inner", [(2, 16, 48), (33, 48, 48), (1003, 1008, 48), (33, 48, 1040)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gradients(rows, vocabulary, padded, inner, dtype, compared):
    found = on_cpu(losses(rows, vocabulary, padded, inner=inner))
    dx = compared(input_gradient(found), dtype).dx
    assert not dx[found.prediction.target == PADDING].any()
    compared(weight_gradient(found), dtype)
    compared(weight_gradient(found, clips=1), dtype)


def test_bfloat16_weights_are_rounded_once():
    """The occurrences of a word are added as float32."""
    found = on_cpu(losses(341, 2, 16))
    compare(weight_gradient(found, dtype=torch.bfloat16))


@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (1003, 1008)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_two_words_of_a_row_are_no_codes(vocabulary, padded, smoothing):
    found = compare(losses(341, vocabulary, padded, smoothing=smoothing))
    given, rows = found.prediction, torch.arange(341)
    scale = given.weight.scale[:vocabulary].double()
    x, weight = given.x.coded.decode().double(), given.weight.codes[:vocabulary] * scale[:, None]
    _, _, exact = by_fairseq(x, weight, given.target, smoothing, torch.float64)
    words = given.target, found.kept.likeliest
    for word, gradient in zip(words, found.kept.gradient, strict=True):
        torch.testing.assert_close(gradient.double(), exact[rows, word], rtol=1e-5, atol=1e-6)
    counted = given.target != PADDING
    assert (found.kept.likeliest != given.target)[counted].all()
    rest = (exact * scale).scatter(1, given.target[:, None], 0.0)
    # Where all are below what smoothing takes from a word, any of them may be kept.
    probable = (x @ weight.t()).softmax(dim=1) * scale
    likeliest = probable.scatter(1, given.target[:, None], 0.0).argmax(dim=1)
    assert torch.equal(found.kept.likeliest[counted], likeliest[counted])
    rest.scatter_(1, found.kept.likeliest[:, None], 0.0)
    largest = rest.abs().amax(dim=1)
    assert (largest <= found.bound * (1 + 1e-5)).all()
    assert (found.bound <= (1 + 1e-5) * (largest + given.each * scale.max())).all()
    codes = compare(rounded_rest(found)).rounded.codes
    assert not any(codes[rows, word].any() for word in words)
    assert codes.any(dim=1).sum() > 200 or vocabulary == 2


def test_sums_are_added_to_what_is_there(runs):
    operation = weight_gradient(on_cpu(losses(41, 33, 48)))
    apart = [one.dweight for one in runs(operation)]
    operation.dweight = operation.others
    given = operation.others.clone()
    for wanted in apart:
        operation.others.copy_(given)
        assert torch.equal(runs(operation)[0].dweight, wanted)


def test_padding_has_no_gradient(compared):
    loss = losses(7, 33, 48)
    loss.prediction.target[:] = PADDING
    found = compared(loss)
    assert not found.kept.gradient.any() and not found.bound.any()
    operation = weight_gradient(found)
    assert torch.equal(compared(operation).dweight, operation.others)


def gradients(loss, split: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dweight by a whole backward pass; `split`: with kept words."""
    given = loss.prediction
    found = on_cpu(loss if split else dataclasses.replace(loss, kept=None))
    rounded = on_cpu(rounded_rest(found, 0.5)).rounded
    accumulated = on_cpu(input_gradient(found)).dx if split else None
    fields = {"weight": given.weight, "accumulated": accumulated}
    dx = empty(*given.x.tensor.shape)
    dx = on_cpu(ProjectInputGradient(gradient=rounded, **fields, dx=dx)).dx
    whole = weight_gradient(found) if split else None
    values = torch.zeros(given.vocabulary, given.x.tensor.shape[1])
    weight = dataclasses.replace(given.weight, values=values, clip=torch.ones(len(values)))
    dweight = on_cpu(
        ProjectWeightGradient(
            gradient=rounded,
            x=given.x,
            weight=weight,
            key=KEY,
            subsequence=9,
            dweight=empty(*values.shape),
            dclip=empty(len(values)),
        )
    ).dweight
    if split:
        whole.others, whole.weight = dweight, weight
        dweight = on_cpu(whole).dweight
    return dx, dweight


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of signal to noise."""
    return 10 * torch.log10(exact.square().sum() / (found - exact).square().sum()).item()


def sure_of_the_target(given) -> None:
    given.target.copy_(given.logits().argmax(dim=1))


def wavering(given) -> None:
    """The target and one other word share most of the probability."""
    other = torch.randint(0, given.vocabulary, given.target.shape)
    weight = given.weight.codes * given.weight.scale[:, None]
    x = weight[given.target] + weight[other]
    given.x.coded.codes.copy_((x / x.abs().max() * 127).round())
    given.x.coded.scale.fill_(5 * x.abs().max() / 127)


@pytest.mark.parametrize(
    "vocabulary, model",
    [*((words, None) for words in (2, 300, 4000)), (300, sure_of_the_target), (300, wavering)],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_noise(vocabulary, model, smoothing):
    """Both gradients against float64: no worse than 38 dB."""
    torch.manual_seed(5)
    padded = -(-vocabulary // 16) * 16
    loss = losses(341, vocabulary, padded, smoothing=smoothing)
    given = loss.prediction
    given.x.coded.scale *= 0.3
    if model is not None:
        model(given)
    x, weight = given.x.coded.decode().double(), given.weight
    weight = (weight.codes * weight.scale[:, None].double())[:vocabulary]
    _, _, exact = by_fairseq(x, weight, given.target, smoothing, torch.float64)
    wanted = 0.5 * (exact @ weight), 0.5 * (exact.t() @ x)
    kept = [decibels(*pair) for pair in zip(gradients(loss, True), wanted, strict=True)]
    row = [decibels(*pair) for pair in zip(gradients(loss, False), wanted, strict=True)]
    assert min(kept) > 38, kept
    assert min(mine - other for mine, other in zip(kept, row, strict=True)) > 5, (kept, row)


@pytest.mark.parametrize("rows", [0, 1, 41])
@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (290, 304)])
def test_losses_and_codes_on_cuda(rows, vocabulary, padded):
    found = compare_cuda(losses(rows, vocabulary, padded))
    rounded = compare_cuda(rounded_rest(found)).rounded
    words = found.prediction.target, found.kept.likeliest
    assert not any(rounded.codes[torch.arange(rows), word].any() for word in words)


@pytest.mark.parametrize("rows", [15, 16, 17, 200])
def test_a_frequent_word_on_cuda(rows):
    """Its occurrences fill several windows."""
    loss = losses(rows, 33, 48)
    loss.prediction.target[:] = 7
    loss.prediction.target[rows // 2 :: 5] = 9
    compare_cuda(weight_gradient(on_cpu(loss)))


def test_launches_on_cuda():
    """In a program the sums are added where the others' gradient is."""
    operation = weight_gradient(on_cpu(losses(41, 33, 48)))
    kernels = [f"lsq_{step}_occurrences" for step in ("rank", "sort", "sum", "join")]
    assert names(launches(operation, None)) == ["lsq_float_operand", *kernels]
    operation.dweight = operation.others
    assert names(launches(operation, None)) == kernels


@pytest.mark.parametrize("word", [-7, 33, 10**12])
def test_a_target_outside_the_vocabulary_makes_its_row_nan_on_cuda(word):
    loss = losses(7, 33, 48)
    loss.prediction.target[:] = 5
    loss.prediction.target[2] = word
    found = run(loss)
    assert found.bound.isnan().tolist() == [row == 2 for row in range(7)]
    assert run(input_gradient(found)).dx.isnan().any(dim=1).nonzero().tolist() == [[2]]
    assert run(weight_gradient(found)).dweight.isfinite().all()
