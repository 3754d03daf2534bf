"""Stacks: one word at a time as all at once; padding is not computed."""

import pytest
import torch
from torch import nn

from lsq.layers import Embedding, Packing, TransformerEncoderLayer
from lsq.layers.stack import Stack
from tests.layers.shapes import HIDDEN, config_of

PADDING = 1


class Causal(Stack, nn.Module):
    """Two causal layers."""

    def __init__(self, normed: bool):
        super().__init__()
        self.embed_tokens = Embedding(11, HIDDEN, PADDING)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(config_of(pre_norm=normed), causal=True) for _ in range(2)
        )
        self.layer_norm = nn.LayerNorm(HIDDEN) if normed else None


@pytest.mark.parametrize("normed", [False, True])
def test_steps_equal_the_whole_also_after_reordering(normed):
    torch.manual_seed(2)
    stack, tokens = Causal(normed).eval(), torch.randint(2, 11, (3, 6))
    stack.rows(tokens, Packing(shape=tokens.shape))
    states, found = {}, []
    for time in range(1, 7):
        if time == 4:
            order = torch.tensor([2, 2])
            tokens = tokens[order]
            stack.reorder(states, order)
        found = stack.step(tokens[:, :time], states)
        packing = Packing(shape=(len(tokens), time))
        for step, whole in zip(found, stack.rows(tokens[:, :time], packing), strict=True):
            assert (step - packing.unpack(whole)[:, -1]).abs().max() < 1e-5
    assert len(found) == 4 and len(states) == 2


def test_words_that_were_not_given_one_by_one_are_named():
    stack, tokens, states = Causal(True).eval(), torch.randint(2, 11, (3, 6)), {}
    stack.rows(tokens, Packing(shape=tokens.shape))
    with pytest.raises(
        ValueError, match="5 words are given, but the states hold 0; .* word by word"
    ):
        stack.step(tokens[:, :5], states)
    stack.step(tokens[:, :1], states)
    with pytest.raises(
        ValueError, match="1 words are given, but the states hold 1; .* empty states"
    ):
        stack.step(tokens[:, :1], states)
    stack.step(tokens[:, :2], states)


def test_padding_is_not_computed():
    stack, tokens = Causal(True).eval(), torch.randint(2, 11, (3, 6))
    tokens[1, 4:] = PADDING
    assert [len(state) for state in stack.rows(tokens, Packing(tokens == PADDING))] == [16] * 4
