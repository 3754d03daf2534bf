"""Embed and its scatter of gradients against autograd, at widths around a strip of 64 columns."""

import pytest
import torch

from lsq.ops.embedding import Embed, EmbedGradient
from lsq.program.tensor import Kind
from lsq.quant import random
from tests.ops.compare import KEY, compare, dropout_of, empty, on_cpu
from tests.ops.programs import builder, run

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
    x = (
        torch.nn.functional.embedding(tokens, leaves[0], PADDING) * SCALE
        + leaves[1][forward.positions]
    )
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
    else:
        assert made.dtable is None


def test_padding_and_absent_words_get_nothing():
    made = compare(embed_gradient(torch.ones(4, 16), torch.tensor([PADDING, 4, 4, PADDING])))
    assert made.dweight.sum(1).tolist() == [0, 0, 0, 0, 2 * 7 * 16, *[0] * 6]
    assert made.dtable.sum(1).tolist() == [0, 0, 0, 0, 2 * 16, *[0] * 15]


def test_nan_reaches_its_word_alone():
    gradient = torch.ones(2, 16)
    gradient[1, 3] = float("nan")
    made = compare(
        embed_gradient(gradient, torch.tensor([4, 6]), torch.tensor([2, 3]), learned=False)
    )
    assert made.dweight.isnan().nonzero().tolist() == [[6, 3]]


def test_a_word_is_summed_in_the_order_of_rows():
    """Times the scale: 7e8 + 7 - 7e8 is 0 in float32, and 7 where the large ones come first."""
    gradient = torch.tensor([[1e8], [1.0], [-1e8]])
    made = compare(embed_gradient(gradient, torch.tensor([4, 4, 4]), learned=False))
    assert made.dweight[4].item() == 0.0


@pytest.mark.parametrize("learned", [False, True])
def test_gradients_of_a_program_are_those_of_the_operation(learned):
    made, one = builder("embedding", mode="float"), embed(21, 48, learned=learned)
    weight, table = (
        made.parameter(name, (rows, 48), Kind.TABLE)
        for name, rows in (("weight", VOCABULARY), ("table", POSITIONS))
    )
    tokens, positions, x = (
        made.input("tokens", (21,)),
        made.input("positions", (21,)),
        made.tensor("x", (21, 48)),
    )
    made.add(
        Embed(
            tokens=tokens,
            positions=positions,
            weight=weight,
            table=table,
            scale=SCALE,
            padding=PADDING,
            learned=learned,
            x=x,
        )
    )
    made.output(x)
    program, upstream = made.build(), torch.randn(21, 48)
    given = {tokens: one.tokens, positions: one.positions, weight: one.weight, table: one.table}
    found = run(program, given | {program.output_gradients[0]: upstream})
    wanted = on_cpu(embed_gradient(upstream, one.tokens, one.positions, learned=learned))
    gradients = dict(zip(program.differentiable, program.gradients, strict=True))
    assert torch.equal(found[x], on_cpu(one).x) and torch.equal(
        found[gradients[weight]], wanted.dweight
    )
    if learned:
        assert torch.equal(found[gradients[table]], wanted.dtable)
    else:
        assert gradients.get(table) is None


def test_limits_of_indices():
    forward = embed(21, 48)
    assert forward.limits() == {"tokens": VOCABULARY, "positions": POSITIONS}
    gradient = torch.randn(21, 48)
    assert embed_gradient(gradient, forward.tokens).limits() == forward.limits()
    assert embed_gradient(gradient, forward.tokens, learned=False).limits() == {
        "tokens": VOCABULARY
    }
