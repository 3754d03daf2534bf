"""TransformerLanguageModel: a Transformer of causal layers that predicts each word from those
before it."""

import torch
from torch import nn

from lsq.config import LayerConfig
from lsq.layers.decoding import State
from lsq.layers.embedding import Embedding
from lsq.layers.encoder_layer import TransformerEncoderLayer
from lsq.layers.packing import Packing, packing_options
from lsq.layers.stack import Stack
from lsq.layers.vocabulary import VocabularyProjection


class TransformerLanguageModel(Stack, nn.Module):
    """Embedding, causal layers, under pre-norm a final norm, and the projection onto the
    vocabulary.

    B sentences, T time, V words. Padding is not computed.

    Args:
        vocabulary: V.
        config: of every layer; its dropout also follows the embedding.
        layers: how many.
        padding_idx: the padding token.
        positions, max_positions: see `lsq.layers.Embedding`.
        tied: words have the same rows in the embedding and in the projection.
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
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(config, causal=True) for _ in range(layers)
        )
        norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[config.norm]
        self.layer_norm = (
            norm(config.hidden, config.layer_norm_epsilon) if config.pre_norm else None
        )
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
        """tokens int64 [B, T] -> logits float32 [B, T, V] of the words that follow, zero in
        padding.

        With `target` int64 [B, T], those words: (loss, nll_loss), scalars summed over targets other
        than padding; only `loss` has a gradient, and the logits are never stored.

        Raises:
            ValueError: an empty batch, a token or target outside the vocabulary, a sentence longer
                than max_positions, another shape of targets, or label_smoothing not in [0, 1).
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
        """tokens int64 [B, T], without padding -> logits float32 [B, V] of the word after the last
        one.

        Only the last word is computed: what the layers keep of those before is in `states`, an
        empty dict at first, and they must have been given one after another. `reorder(states,
        order)` selects sentences.

        Raises:
            ValueError: as `forward`; training mode, or clips that were never measured.
        """
        return self.output_projection(self.step(tokens, states)[-1])
