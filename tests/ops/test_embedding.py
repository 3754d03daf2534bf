"""embedding and its scatter of gradients against autograd, at widths around a strip of 64 columns."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.ops import random as philox_random
from lsq.program import layers
from tests.ops.compare import KEY, compare, compare_program

PADDING, VOCABULARY, POSITIONS = 1, 11, 20
FORWARD = {"scale": 7.0, "padding": PADDING, "stream": 5}
BACKWARD = {"vocabulary": VOCABULARY, "positions": POSITIONS}


def case(batch, time, columns):
    """tokens (some of them padding), places, weight, table."""
    tokens = torch.randint(0, VOCABULARY, (batch, time))
    places = torch.randint(0, POSITIONS, (batch, time))
    return tokens, places, torch.randn(VOCABULARY, columns), torch.randn(POSITIONS, columns)


@pytest.mark.parametrize("batch, time", [(1, 1), (7, 1), (1, 41), (11, 31)])
@pytest.mark.parametrize("learned", [False, True])
def test_in_a_program(batch, time, learned):
    program = layers.embedding(
        QuantConfig(mode="float"), batch, time, VOCABULARY, 48, POSITIONS, PADDING, 7.0, 0.1, learned, True, True
    )
    assert compare_program(program) == {"embedding", "embedding_backward"}


@pytest.mark.parametrize("columns", [1, 7, 63, 64, 65, 200])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("learned", [False, True])
def test_against_autograd(columns, dropout, learned):
    tokens, places, weight, table = case(3, 7, columns)
    options = FORWARD | {"dropout": dropout, "learned": learned}
    (found,) = compare("embedding", tokens, places, weight, table, KEY, **options)
    leaves = [weight.requires_grad_(), table.requires_grad_()]
    x = (torch.nn.functional.embedding(tokens, weight, PADDING) * 7.0 + table[places]).transpose(0, 1).reshape(21, -1)
    expected = philox_random.dropout(x, dropout, KEY, 5)
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-6)
    upstream = torch.randn(21, columns)
    dweight, dtable = compare("embedding_backward", upstream, tokens, places, KEY, **options, **BACKWARD)
    upstream = torch.where(tokens.t().reshape(-1, 1) == PADDING, 0.0, upstream)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(dweight, wanted[0], atol=1e-5, rtol=1e-5)
    if learned:
        torch.testing.assert_close(dtable, wanted[1], atol=1e-5, rtol=1e-5)
    else:
        assert dtable is None


def test_padding_and_absent_words_get_nothing():
    tokens = torch.tensor([[PADDING, 4, 4, PADDING]])
    dweight, dtable = compare(
        "embedding_backward", torch.ones(4, 16), tokens, tokens, KEY, dropout=0.0, learned=True, **FORWARD, **BACKWARD
    )
    assert dweight.sum(1).tolist() == [0, 0, 0, 0, 2 * 7 * 16, *[0] * 6]
    assert dtable.sum(1).tolist() == [0, 0, 0, 0, 2 * 16, *[0] * 15]


def test_nan_reaches_its_word_alone():
    gradient = torch.ones(2, 16)
    gradient[1, 3] = float("nan")
    dweight, _ = compare(
        "embedding_backward", gradient, torch.tensor([[4, 6]]), torch.tensor([[2, 3]]), KEY,
        dropout=0.0, learned=False, **FORWARD, **BACKWARD,
    )
    assert dweight.isnan().nonzero().tolist() == [[6, 3]]
