"""What the benchmarks of gradient exchange train: a small language model, on text that is made
without data files.

The text is that of `lsq numbers`, lines such as "twenty-one = einundzwanzig", or sentences of
invented words whose order follows a random grammar; either as bytes. With the default shape the
model has 660,608 parameters.
Shape letters: B sequences, T bytes of a sequence, H hidden.
"""

import random
from dataclasses import dataclass

import numpy
import torch
from torch import nn
from torch.nn import functional

BYTES = 256
"""Vocabulary: every byte of UTF-8."""
TEXT_SEED = 1
TRAIN_NUMBERS = 20000
HELD_OUT_NUMBERS = 500
WORDS = 1000
"""Of invented sentences."""
SUCCESSORS = 20
"""Words that may follow a word; the n-th of them does with a probability proportional to 1/n."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    positions: int = 256
    """Longest sequence, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """uint8 [bytes] each: concatenated lines, in random order."""

    train: torch.Tensor
    held_out: torch.Tensor


class Block(nn.Module):
    """Self-attention and feed-forward, each behind a LayerNorm and with a residual connection."""

    def __init__(self, shape: Shape):
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        split = self.query_key_value(self.attention_norm(x_BTH)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTH = x_BTH + self.attention_output(mixed.transpose(1, 2).flatten(2))
        return x_BTH + self.feed_forward(self.feed_forward_norm(x_BTH))


class LanguageModel(nn.Module):
    """Causal Transformer over bytes; the output projection is the embedding. No dropout."""

    def __init__(self, shape: Shape, seed: int):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(BYTES, shape.hidden)
            self.positions = nn.Embedding(shape.positions, shape.hidden)
            self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
            self.norm = nn.LayerNorm(shape.hidden)
            for table in (self.embedding, self.positions):
                nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in nats per byte, of each byte given those before it; int64 [B, T] ->
        float32 []."""
        read, wanted = tokens_BT[:, :-1], tokens_BT[:, 1:]
        x_BTH = self.embedding(read) + self.positions.weight[: read.shape[1]]
        logits = functional.linear(self.norm(self.blocks(x_BTH)), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def make_text(train_numbers: int = TRAIN_NUMBERS, held_out_numbers: int = HELD_OUT_NUMBERS) -> Text:
    """Names of random numbers; none is in both parts."""
    # brings fairseq, which processes do not need
    from lsq.text.numbers import (
        name_numbers,
        sample_numbers,
    )

    generator = random.Random(TEXT_SEED)
    held_out = sample_numbers(held_out_numbers, generator)
    train = sample_numbers(train_numbers, generator, set(held_out))

    def lines(numbers: list[int]) -> torch.Tensor:
        corpus = name_numbers(numbers, "naming numbers")
        pairs = zip(corpus.source, corpus.target, strict=True)
        text = "".join(f"{english} = {german}\n" for english, german in pairs).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    return Text(train=lines(train), held_out=lines(held_out))


def make_sentences(train_words: int = 300_000, held_out_words: int = 10_000) -> Text:
    """Invented words, each of which decides by chance which of its successors comes next.

    Its loss falls evenly: there is no rule that a model suddenly finds out, as there is in number
        names.
    """
    generator = numpy.random.default_rng(TEXT_SEED)
    letters = numpy.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(generator.choice(letters, generator.integers(2, 9))) for _ in range(WORDS)]
    successors = generator.integers(WORDS, size=(WORDS, SUCCESSORS))
    chances = 1 / numpy.arange(1, SUCCESSORS + 1)
    ranks = generator.choice(
        SUCCESSORS, size=train_words + held_out_words, p=chances / chances.sum()
    )
    word, found = 0, []
    for rank in ranks:
        word = successors[word, rank]
        found.append(words[word])

    def join(part: list[str]) -> torch.Tensor:
        return torch.frombuffer(bytearray(" ".join(part).encode()), dtype=torch.uint8)

    return Text(train=join(found[:train_words]), held_out=join(found[train_words:]))


def microbatch(text: torch.Tensor, number: int, *, sequences: int, length: int) -> torch.Tensor:
    """Pieces of `text` uint8 at places that `number` seeds: int64 [sequences, length]."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - length + 1, (sequences, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def held_out_loss(model: nn.Module, text: torch.Tensor, *, sequences: int, length: int) -> float:
    """Mean loss over pieces of `text` that follow one another, nats per byte."""
    count = min(sequences, len(text) // length)
    with torch.no_grad():
        return model(text[: count * length].view(count, length).long()).item()


def schedule(step: int, steps: int, warm_up: int) -> float:
    """Factor of the learning rate at `step` (from 0): a linear rise over `warm_up` steps, then a
    cosine to zero."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done)).item())
