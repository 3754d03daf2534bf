"""Embedding against fairseq's embedding and positions."""

import math

import pytest
import torch
from fairseq.modules import PositionalEmbedding

from lsq.layers import Embedding

VOCABULARY, HIDDEN, PADDING, LONGEST = 23, 18, 1, 31
TOKENS = torch.tensor([[4, 7, 2, 9, 4], [1, 1, 22, 4, 2], [5, 4, 2, 1, 1]])


def pair(learned, scale=None, layer_norm=False, hidden=HIDDEN):
    """(ours, the same of fairseq's parts: tokens -> [T, B, H], their parameters by our names)."""
    positions = "learned" if learned else "sinusoidal"
    ours = Embedding(
        VOCABULARY,
        hidden,
        PADDING,
        positions=positions,
        max_positions=LONGEST,
        scale=scale,
        layer_norm=layer_norm,
    )
    words = torch.nn.Embedding(VOCABULARY, hidden, PADDING)
    places = PositionalEmbedding(LONGEST, hidden, PADDING, learned)
    theirs = {"weight": words.weight}
    if learned:
        theirs["position_weight"] = places.weight
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(getattr(ours, name))
    norm = torch.nn.LayerNorm(hidden)
    factor = math.sqrt(hidden) if scale is None else scale

    def run(tokens):
        x = factor * words(tokens) + places(tokens)
        return (norm(x) if layer_norm else x).transpose(0, 1)

    return ours, run, theirs


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("scale, hidden", [(None, HIDDEN), (1.0, 17), (None, 130)])
def test_equals_fairseq(learned, layer_norm, scale, hidden):
    ours, theirs, parameters = pair(learned, scale, layer_norm, hidden)
    found, expected = ours(TOKENS), theirs(TOKENS)
    assert found.shape == (5, 3, hidden)
    assert (found - expected).abs().max() < 2e-6
    upstream = torch.randn_like(expected)
    leaves = [getattr(ours, name) for name in parameters]
    gradients = torch.autograd.grad(found, leaves, upstream)
    wanted = torch.autograd.grad(expected, list(parameters.values()), upstream)
    for name, gradient, other in zip(parameters, gradients, wanted, strict=True):
        assert (gradient - other).abs().max() < 2e-5, name


@pytest.mark.parametrize("learned", [False, True])
def test_padding_stays_zero(learned):
    embedding = Embedding(
        VOCABULARY, HIDDEN, PADDING, positions="learned" if learned else "sinusoidal"
    )
    x = embedding(TOKENS)
    assert not x[:2, 1].any() and not x[3:, 2].any()
    x.square().sum().backward()
    assert not embedding.weight.grad[PADDING].any()
    assert embedding.weight.grad[4].any() and not embedding.weight.grad[8].any()
    if learned:
        assert not embedding.position_weight.grad[PADDING].any()


def test_positions():
    """Padding on the left moves none; an offset moves all."""
    embedding = Embedding(VOCABULARY, HIDDEN, PADDING, positions="learned")
    x = embedding(torch.tensor([[1, 1, 4, 7], [4, 7, 1, 1]]))
    assert torch.equal(x[2:, 0], x[:2, 1])
    tokens = torch.tensor([[4, 7, 9], [5, 6, 8]])
    assert torch.equal(embedding(tokens[:, 2:], offset=2), embedding(tokens)[2:])


@pytest.mark.parametrize("layer_norm", [False, True])
def test_dropout(layer_norm):
    embedding = Embedding(VOCABULARY, 64, PADDING, dropout=0.25, layer_norm=layer_norm)
    tokens = torch.randint(4, VOCABULARY, (20, 30))
    plain = embedding.eval()(tokens)
    embedding.train()
    torch.manual_seed(1)
    dropped = embedding(tokens)
    kept = dropped != 0
    assert 0.74 < kept.float().mean() < 0.76
    assert torch.allclose(dropped[kept], plain[kept] / 0.75, rtol=1e-5)
    assert not torch.equal(embedding(tokens), dropped)
    torch.manual_seed(1)
    assert torch.equal(embedding(tokens), dropped)
    if not layer_norm:  # gradients follow the dropout
        x = embedding(tokens[:1, :1])
        embedding.zero_grad()
        x.sum().backward()
        factor = torch.where(x[0, 0] != 0, embedding.scale / 0.75, 0.0)
        torch.testing.assert_close(embedding.weight.grad[tokens[0, 0]], factor)


def test_refusals():
    embedding = Embedding(VOCABULARY, HIDDEN, PADDING, max_positions=LONGEST, positions="learned")
    tokens = torch.full((2, LONGEST), 4)
    assert embedding(tokens).shape == (LONGEST, 2, HIDDEN)
    for call, message in (
        (lambda: embedding(torch.full((2, LONGEST + 1), 4)), "32 tokens.*max_positions = 31"),
        (lambda: embedding(tokens[:, :1], offset=LONGEST), "32 tokens"),
        (lambda: embedding(torch.tensor([[3, -1]])), f"-1.*{VOCABULARY} words"),
        (lambda: embedding(torch.tensor([[3, VOCABULARY]])), f"{VOCABULARY}.*{VOCABULARY} words"),
        (
            lambda: Embedding(VOCABULARY, HIDDEN, PADDING, positions="rotary"),
            "'rotary'; allowed: 'sinusoidal', 'learned'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
