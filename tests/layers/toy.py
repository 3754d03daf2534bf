"""A small translator of lsq's layers, and losses of a short training."""

import copy

import torch
from torch import nn

from lsq.layers import (
    Embedding,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
)
from tests.layers.shapes import config_of

VOCABULARY, PADDING = 29, 1


class Translator(nn.Module):
    """Two encoder layers, two decoder layers, of which `twice` runs the last again, and a loss."""

    def __init__(self, twice: bool = False, **options):
        super().__init__()
        config = config_of(dropout=0.1, **options)
        self.twice = twice
        self.embedding = Embedding(
            VOCABULARY, config.hidden, PADDING, dropout=0.1, max_positions=40
        )
        self.encoder = nn.ModuleList(TransformerEncoderLayer(config) for _ in range(2))
        self.decoder = nn.ModuleList(TransformerDecoderLayer(config) for _ in range(2))
        self.projection = VocabularyProjection(
            VOCABULARY,
            config.hidden,
            quant=config.quant,
            weight=self.embedding.weight,
            padding_idx=PADDING,
        )

    def forward(self, source, target):
        mask = source == PADDING
        memory = self.embedding(source)
        for layer in self.encoder:
            memory = layer(memory, mask)
        x = self.embedding(target)
        for layer in [*self.decoder, self.decoder[-1]] if self.twice else self.decoder:
            x = layer(x, memory, mask)
        loss, _ = self.projection.loss(x, target.t(), 0.1)
        return loss / target.numel()


def batch(sentences: int, source: int, target: int, seed: int = 0):
    """Tokens int64 [B, S] and [B, T]; every second batch is padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [
        torch.randint(4, VOCABULARY, (sentences, length), generator=generator)
        for length in (source, target)
    ]
    if seed % 2:
        tokens[0][1:, -2:] = PADDING
    return tokens


def largest(model, sentences: int = 4, length: int = 16):
    """A step on the largest batch, to plan for."""
    return lambda: model(*batch(sentences, length, length))


def losses(model, updates: int, *, accumulate: int = 1) -> list[float]:
    """Losses of a short training, in place, on batches of changing size."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    found = []
    for number in range(updates):
        for part in range(accumulate):
            size = 1 + (number + part) % 4, 5 + 3 * (number % 3), 16 - 4 * (number % 4)
            loss = model(*batch(*size, seed=number + part))
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def twins(**options):
    """Two equal translators."""
    torch.manual_seed(1)
    model = Translator(**options)
    return model, copy.deepcopy(model)
