"""Embed and its scatter of gradients against autograd, on the CPU and on CUDA."""

import pytest
import torch

from lsq.ops.embedding import Embed, EmbedGradient
from lsq.quant import random
from tests.ops.compare import KEY, compare, dropout_of, empty, on_cpu
from tests.ops.cuda import DTYPES, compare_cuda

PADDING, VOCABULARY, POSITIONS, SCALE = 1, 11, 20, 7.0


def embed(rows: int, columns: int, dropout: float = 0.0, learned: bool = True) -> Embed:
    """Some of the tokens are padding."""
    return Embed(
        tokens=torch.randint(0, VOCABULARY, (rows,)),
        positions=torch.randint(0, POSITIONS, (rows,)),
        weight=torch.randn(VOCABULARY, columns),
        table=torch.randn(POSITIONS, columns),
        scale=SCALE,
        padding=PADDING,
        dropout=dropout_of(dropout, 5),
        learned=learned,
        x=empty(rows, columns),
    )


def embed_gradient(
    gradient, tokens, positions=None, dropout: float = 0.0, learned: bool = True, **sizes
) -> EmbedGradient:
    """Of tokens that stand at `positions`, or at positions of the same numbers."""
    columns, sizes = gradient.shape[1], {"vocabulary": VOCABULARY, "positions": POSITIONS} | sizes
    return EmbedGradient(
        gradient=gradient,
        tokens=tokens,
        positions=tokens if positions is None else positions,
        dropout=dropout_of(dropout, 5),
        scale=SCALE,
        padding=PADDING,
        dweight=empty(sizes["vocabulary"], columns),
        dtable=empty(sizes["positions"], columns) if learned else None,
    )


@pytest.mark.parametrize(
    "rows, columns", [(0, 48), (1, 1), (7, 63), (21, 64), (341, 65), (41, 200)]
)
@pytest.mark.parametrize("dropout, learned", [(0.0, True), (0.3, True), (0.3, False)])
def test_against_autograd(rows, columns, dropout, learned):
    forward = embed(rows, columns, dropout, learned)
    found, tokens, upstream = compare(forward).x, forward.tokens, torch.randn(rows, columns)
    leaves = [forward.weight.requires_grad_(), forward.table.requires_grad_()]
    words = torch.nn.functional.embedding(tokens, leaves[0], PADDING)
    x = words * SCALE + leaves[1][forward.positions]
    expected = random.dropout(x, dropout, KEY, 5)
    assert not found[tokens == PADDING].any()
    expected = torch.where(tokens[:, None] == PADDING, 0.0, expected)
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-6)
    made = compare(embed_gradient(upstream, tokens, forward.positions, dropout, learned))
    kept = torch.where(tokens[:, None] == PADDING, 0.0, upstream)
    dweight, dtable = torch.autograd.grad(expected, leaves, kept)
    torch.testing.assert_close(made.dweight, dweight, atol=1e-5, rtol=1e-5)
    if learned:
        torch.testing.assert_close(made.dtable, dtable, atol=1e-5, rtol=1e-5)


def test_padding_and_absent_words_get_nothing(compared):
    gradient, tokens = torch.ones(4, 16), torch.tensor([PADDING, 4, 4, PADDING])
    gradient[tokens == PADDING] = float("nan")
    made = compared(embed_gradient(gradient, tokens))
    assert made.dweight.sum(1).tolist() == [0, 0, 0, 0, 2 * 7 * 16, *[0] * 6]
    assert made.dtable.sum(1).tolist() == [0, 0, 0, 0, 2 * 16, *[0] * 15]


def test_nan_reaches_its_word_alone(compared):
    gradient = torch.ones(2, 16)
    gradient[1, 3] = float("nan")
    places = torch.tensor([4, 6]), torch.tensor([2, 3])
    made = compared(embed_gradient(gradient, *places, learned=False))
    assert made.dweight.isnan().nonzero().tolist() == [[6, 3]]


def test_a_word_is_summed_in_the_order_of_rows():
    """Times the scale: 7e8 + 7 - 7e8 is 0 in float32, and 7 where the large ones come first."""
    gradient = torch.tensor([[1e8], [1.0], [-1e8]])
    made = compare(embed_gradient(gradient, torch.tensor([4, 4, 4]), learned=False))
    assert made.dweight[4].item() == 0.0


def test_limits_of_indices():
    forward = embed(21, 48)
    assert forward.limits() == {"tokens": VOCABULARY, "positions": POSITIONS}
    gradient = torch.randn(21, 48)
    assert embed_gradient(gradient, forward.tokens).limits() == forward.limits()
    assert embed_gradient(gradient, forward.tokens, learned=False).limits() == {
        "tokens": VOCABULARY
    }


@pytest.mark.parametrize("rows, columns", [(0, 48), (1, 48), (7, 48), (341, 48), (35, 1040)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("learned", [False, True])
def test_both_passes_on_cuda(rows, columns, dtype, dropout, learned):
    forward = embed(rows, columns, dropout, learned)
    compare_cuda(forward, dtype)
    gradient, places = torch.randn(rows, columns), (forward.tokens, forward.positions)
    compare_cuda(embed_gradient(gradient, *places, dropout, learned), dtype)


def test_rare_words_are_summed_in_the_order_of_the_cpu_on_cuda():
    """Words that occur in one window of sorted occurrences: the same additions, the same bits."""
    tokens = torch.arange(64) // 2 % 32
    options = {"dropout": 0.1, "learned": False, "vocabulary": 32}
    operation = embed_gradient(torch.randn(64, 48), tokens, **options)
    assert torch.equal(compare_cuda(operation).dweight, on_cpu(operation).dweight)


@pytest.mark.parametrize("length", [15, 16, 17, 33, 200, 671])
@pytest.mark.parametrize("first", [0, 1, 15])
def test_a_frequent_word_between_rare_ones_on_cuda(length, first):
    """Runs that begin, end, or fill windows, and those that reach over several."""
    tokens = torch.tensor([3] * first + [4] * length + [6, 6, 7])
    gradient = torch.randn(len(tokens), 48)
    compare_cuda(embed_gradient(gradient, tokens, torch.zeros_like(tokens), 0.1))
