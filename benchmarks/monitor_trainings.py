"""Small trainings for monitor_bounds.py: models of nn.Linear that lsq.convert takes, and models of
lsq's own layers.

All read the text of `lsq numbers` as bytes. Shape letters: B sequences, T bytes of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from language_model import BYTES, LanguageModel, Shape, Text, microbatch
from torch import Tensor, nn
from torch.nn import functional

import lsq
from lsq.config import LayerConfig, QuantConfig, Rotary
from lsq.layers import (
    Embedding,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    TransformerLanguageModel,
    VocabularyProjection,
)

PADDING = 0
SEQUENCES, LENGTH = 8, 64
LAYER = {"hidden": 128, "heads": 4, "dropout": 0.1}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and its loss on a batch."""

    make: Callable[[QuantConfig], nn.Module]
    """In int8, or under mode="float" in floats."""
    loss: Callable[[nn.Module, Text, int], Tensor]
    """Of (model, text, number of the batch), nats for each byte."""
    bfloat16: bool = False
    """Whether it runs under autocast."""


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)), in the place of a feed-forward block."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Translator(nn.Module):
    """Two encoder and two decoder layers of lsq, post-norm and ReLU as in fairseq's Transformer,
    over bytes."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.embedding = Embedding(BYTES, config.hidden, PADDING, dropout=config.dropout)
        self.encoder = nn.ModuleList(TransformerEncoderLayer(config) for _ in range(2))
        self.decoder = nn.ModuleList(TransformerDecoderLayer(config) for _ in range(2))
        self.projection = VocabularyProjection(
            BYTES,
            config.hidden,
            quant=config.quant,
            weight=self.embedding.weight,
            padding_idx=PADDING,
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [B, S], [B, T] -> mean loss of each byte of the target after those before it."""
        padded, x = source == PADDING, self.embedding(source)
        for layer in self.encoder:
            x = layer(x, padded)
        read, wanted = target[:, :-1], target[:, 1:]
        y = self.embedding(read)
        for layer in self.decoder:
            y = layer(y, x, padded, self_padding_mask=read == PADDING)
        return self.projection.loss(y.transpose(0, 1), wanted)[0] / (wanted != PADDING).sum()


def converted(model: nn.Module, quant: QuantConfig) -> nn.Module:
    if quant.quantized:
        lsq.convert(model, quant)
    return model


def gpt(quant: QuantConfig) -> nn.Module:
    return converted(LanguageModel(Shape(), seed=1), quant)


def gated(quant: QuantConfig) -> nn.Module:
    model = LanguageModel(Shape(), seed=1)
    for block in model.blocks:
        block.feed_forward = Gated(Shape().hidden, 352)
    return converted(model, quant)


def whole_layers(quant: QuantConfig) -> nn.Module:
    config = LayerConfig(
        **{**LAYER, "dropout": 0.0},
        feed_forward=352,
        activation="silu",
        gated=True,
        bias=False,
        norm="rms",
        pre_norm=True,
        rotary=Rotary(places=LENGTH),
        quant=quant,
    )
    return TransformerLanguageModel(BYTES, config, layers=3, padding_idx=PADDING)


def translator(quant: QuantConfig) -> nn.Module:
    return Translator(LayerConfig(**LAYER, feed_forward=512, quant=quant))


def own_loss(model: nn.Module, text: Text, number: int) -> Tensor:
    return model(microbatch(text.train, number, sequences=SEQUENCES, length=LENGTH))


def summed_loss(model: nn.Module, text: Text, number: int) -> Tensor:
    tokens = microbatch(text.train, number, sequences=SEQUENCES, length=LENGTH)
    return model(tokens[:, :-1], tokens[:, 1:])[0] / tokens[:, 1:].numel()


def pair_loss(model: nn.Module, text: Text, number: int) -> Tensor:
    """Of whole lines, "twenty-one = einundzwanzig": the second part after the first."""
    piece = microbatch(text.train, number, sequences=1, length=SEQUENCES * LENGTH * 2)[0]
    lines = bytes(piece.tolist()).split(b"\n")[1:-1]
    pairs = [[torch.tensor(list(part)) for part in line.split(b"=")] for line in lines]
    return model(
        *(nn.utils.rnn.pad_sequence(side, batch_first=True) for side in zip(*pairs, strict=True))
    )


TRAININGS = {
    "GPT of nn.Linear": Training(make=gpt, loss=own_loss),
    "the same, bfloat16": Training(make=gpt, loss=own_loss, bfloat16=True),
    "gated, of nn.Linear": Training(make=gated, loss=own_loss),
    "Llama's layers, whole": Training(make=whole_layers, loss=summed_loss),
    "translation, whole layers": Training(make=translator, loss=pair_loss),
}


def float_twin(quant: QuantConfig) -> QuantConfig:
    """The same without rounding."""
    return replace(quant, mode="float")
