"""Stacks of an embedding, layers and a final norm, and a language model made of them."""

import torch
from torch import nn

from lsq.config import LayerConfig
from lsq.layers.decoding import State, reorder
from lsq.layers.embedding import Embedding
from lsq.layers.packing import Packing, packing_options
from lsq.layers.transformer import TransformerEncoderLayer
from lsq.layers.vocabulary import VocabularyProjection


class Stack:
    """Methods of modules with `embed_tokens` (an Embedding), `layers` and `layer_norm` (or None).

    M rows, B sentences, T time, H hidden size. `memory`: further inputs of each layer, if any.
    """

    def rows(self, tokens: torch.Tensor, packing: Packing, *memory) -> list[torch.Tensor]:
        """Run tokens int64 [B, T]; return float32 [M, H] of the embedding, each layer, the norm."""
        states = [self.embedded(tokens, packing, 0)]
        for layer in self.layers:
            states.append(layer.rows(states[-1], packing, *memory))
        return [*states, self._normalised(states[-1])]

    def last_rows(self, tokens: torch.Tensor, packing: Packing, *memory) -> torch.Tensor:
        """Return the last tensor of `rows`, and free the earlier ones on the way."""
        x = self.embedded(tokens, packing, 0)
        for layer in self.layers:
            x = layer.rows(x, packing, *memory)
        return self._normalised(x)

    def step(self, tokens: torch.Tensor, states: dict[str, State], *memory) -> list[torch.Tensor]:
        """Do what `rows` does for the last of tokens int64 [B, T] alone: [B, H] each.

        `states`, empty at first, hold earlier words. Raises ValueError unless these are T - 1.
        """
        kept = states.get(_key(0), {}).get("history")
        past = 0 if kept is None else kept.shape[1]
        if past != tokens.shape[1] - 1:
            raise ValueError(
                f"{tokens.shape[1]} words are given, but the states hold {past}; only the last word"
                " is computed: give a prefix word by word, and begin a new one with empty states"
            )
        # without a mask: a sentence may begin with padding_idx
        packing = Packing(shape=(len(tokens), 1), backend=self.embed_tokens.target)
        found = [self.embedded(tokens[:, -1:], packing, tokens.shape[1] - 1)]
        for index, layer in enumerate(self.layers):
            found.append(layer.step(found[-1], *memory, states.setdefault(_key(index), {})))
        return [*found, self._normalised(found[-1])]

    def embedded(self, tokens: torch.Tensor, packing: Packing, offset: int) -> torch.Tensor:
        """Embed tokens at positions from `offset` on: the first layer's input [M, H]."""
        return self.embed_tokens.rows(tokens, packing, offset)

    def reorder(self, states: dict[str, State], order: torch.Tensor) -> None:
        """Select the sentences with indices `order` int64 [B'] in all states, in place."""
        for index in range(len(self.layers)):
            reorder(states.get(_key(index), {}), order)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.layer_norm is None else self.layer_norm(x)


def _key(index: int) -> str:
    return f"lsq_layer_{index}"


class TransformerLanguageModel(Stack, nn.Module):
    """Embedding, causal layers, a final norm (pre-norm), and a projection onto the vocabulary.

    B sentences, T time, V words. Padding is not computed.

    Args:
        vocabulary: V.
        config: of every layer; its dropout also follows the embedding.
        layers: how many.
        positions, max_positions: see `lsq.layers.Embedding`.
        tied: the embedding and the projection share their weight.
    """

    def __init__(
        self,
        vocabulary: int,
        config: LayerConfig,
        *,
        layers: int,
        padding_idx: int,
        positions: str = "sinusoidal",
        max_positions: int = 1024,
        tied: bool = True,
    ):
        super().__init__()
        self.padding_idx = padding_idx
        self.embed_tokens = Embedding(
            vocabulary,
            config.hidden,
            padding_idx,
            positions=positions,
            max_positions=max_positions,
            dropout=config.dropout,
        )
        every = (TransformerEncoderLayer(config, causal=True) for _ in range(layers))
        self.layers = nn.ModuleList(every)
        norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[config.norm]
        sizes = config.hidden, config.layer_norm_epsilon
        self.layer_norm = norm(*sizes) if config.pre_norm else None
        self.output_projection = VocabularyProjection(
            vocabulary,
            config.hidden,
            quant=config.quant,
            weight=self.embed_tokens.weight if tied else None,
            padding_idx=padding_idx,
        )

    def forward(
        self, tokens: torch.Tensor, target: torch.Tensor | None = None, label_smoothing: float = 0.0
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the next words, or their losses if `target` is given.

        Args:
            tokens: int64 [B, T].
            target: int64 [B, T], the next words.

        Returns:
            Logits float32 [B, T, V], zero in padding. With `target`: (loss, nll_loss), scalars
            summed over targets other than padding; only `loss` has a gradient.

        Raises:
            ValueError: an empty batch, other shapes, words outside the vocabulary, sentences longer
                than max_positions, or label_smoothing outside of [0, 1).
        """
        packing = Packing(tokens == self.padding_idx, **packing_options(self))
        features = self.last_rows(tokens, packing)
        if target is None:
            return packing.unpack(self.output_projection(features))
        if target.shape != tokens.shape:
            raise ValueError(
                f"the targets are {tuple(target.shape)}; they must be {tuple(tokens.shape)}"
            )
        return self.output_projection.loss(
            features, packing.pack(target, fill=self.padding_idx), label_smoothing
        )

    @torch.no_grad()
    def next_word(self, tokens: torch.Tensor, states: dict[str, State]) -> torch.Tensor:
        """Return logits float32 [B, V] of the word after tokens int64 [B, T], without padding.

        Only the last word is computed. `states`, an empty dict at first, hold the words of earlier
        calls, one a call; `reorder` selects sentences. Raises ValueError as `forward` does, and in
        training mode or without measured clips.
        """
        return self.output_projection(self.step(tokens, states)[-1])
