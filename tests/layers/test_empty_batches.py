"""Batches without sentences, and inputs of other shapes: one ValueError that names them, from every
module alike."""

import pytest
import torch

from lsq.config import LayerConfig
from lsq.layers import (
    Embedding,
    FeedForward,
    MultiheadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
)
from tests.layers.shapes import HIDDEN, config_of


def empty_calls(config: LayerConfig) -> dict:
    """Every module on a batch without sentences."""
    x, memory = torch.zeros(5, 0, HIDDEN, requires_grad=True), torch.zeros(7, 0, HIDDEN)
    projection = VocabularyProjection(40, HIDDEN, quant=config.quant)
    return {
        "encoder layer": lambda: TransformerEncoderLayer(config)(
            x, torch.zeros(0, 5, dtype=torch.bool)
        ),
        "decoder layer": lambda: TransformerDecoderLayer(config)(x, memory),
        "attention": lambda: MultiheadAttention(config)(x),
        "cross attention": lambda: MultiheadAttention(config, cross=True)(x, memory),
        "feed-forward": lambda: FeedForward(config)(x),
        "logits": lambda: projection(x),
        "loss": lambda: projection.loss(x, torch.zeros(5, 0, dtype=torch.int64)),
        "no targets": lambda: projection.loss(
            torch.zeros(5, 2, HIDDEN), torch.zeros(5, 0, dtype=torch.int64)
        ),
        "embedding": lambda: Embedding(40, HIDDEN, 1)(torch.zeros(0, 5, dtype=torch.int64)),
    }


@pytest.mark.parametrize("mode", ["int8", "float"])
@pytest.mark.parametrize("name", empty_calls(config_of()))
def test_a_batch_without_sentences_is_refused(mode, name):
    with pytest.raises(ValueError, match=r"(is|are) \(.*\b0\b.*\); (it|they) must be"):
        empty_calls(config_of(mode=mode))[name]()


@pytest.mark.parametrize("shape", [(), (HIDDEN,), (5, HIDDEN), (5, 2, HIDDEN + 1), (0, 2, HIDDEN)])
def test_layers_name_the_shape_that_they_take(shape):
    for module in (TransformerEncoderLayer, MultiheadAttention):
        with pytest.raises(
            ValueError, match=rf"it must be \[time, sentences, {HIDDEN}\] with at least one word"
        ):
            module(config_of())(torch.zeros(shape))
    with pytest.raises(ValueError, match="the input is"):
        FeedForward(config_of())(torch.zeros(()))
