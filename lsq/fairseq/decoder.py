"""The decoder behind fairseq's interface. B batch, T target time, H hidden, V vocabulary."""

from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from lsq.fairseq.encoder import build_embedding, final_norm
from lsq.fairseq.options import layer_config, quantization
from lsq.layers import TransformerDecoderLayer, VocabularyProjection

IncrementalState = dict[str, dict[str, Tensor]]


class LSQTransformerDecoder(FairseqIncrementalDecoder):
    """Embedding, decoder layers, under pre-norm a final LayerNorm, and the projection onto the vocabulary.

    Args:
        args: fairseq's options of the model.
        dictionary: the target words.
        weight: the words' rows [V, H], shared with the projection if the options say so.
    """

    def __init__(self, args: Any, dictionary: Dictionary, weight: nn.Parameter):
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embed_tokens = build_embedding(args, "decoder", dictionary, weight)
        config = layer_config(args, "decoder")
        self.layers = nn.ModuleList(TransformerDecoderLayer(config) for _ in range(args.decoder_layers))
        self.layer_norm = final_norm(args, "decoder")
        self.output_projection = VocabularyProjection(
            len(dictionary),
            config.hidden,
            quant=quantization(args),
            weight=weight if args.share_decoder_input_output_embed else None,
            padding_idx=self.padding_idx,
        )

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]],
        incremental_state: IncrementalState | None = None,
        features_only: bool = False,
        **options,
    ) -> tuple[Tensor, dict[str, list]]:
        """Logits float32 [B, T, V], or features [B, T, H] if `features_only`, and extra outputs.

        With an incremental state, only the last token counts and T is 1. `options`: as `extract_features` takes them.
        """
        x, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state, **options)
        return (x if features_only else self.output_layer(x)), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]],
        incremental_state: IncrementalState | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, dict[str, list]]:
        """prev_output_tokens int64 [B, T] -> features float32 [B, T, H], {"attn": [None], "inner_states": [...]}.

        Raises:
            ValueError: attention weights or an unmasked future are wanted.
        """
        if full_context_alignment or alignment_layer is not None or alignment_heads is not None:
            raise ValueError(
                "lsq_transformer keeps no attention weights: full_context_alignment, alignment_layer and "
                "alignment_heads are not supported; leave them out"
            )
        offset = 0
        if incremental_state is not None:
            offset = prev_output_tokens.shape[1] - 1
            prev_output_tokens = prev_output_tokens[:, -1:]
        memory, memory_padding = encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
        x = self.embed_tokens(prev_output_tokens, offset)
        states = [x]
        for index, layer in enumerate(self.layers):
            if incremental_state is None:
                padding = prev_output_tokens.eq(self.padding_idx)
                x = layer(x, memory, memory_padding, self_padding_mask=padding)
            else:
                x = layer(x, memory, memory_padding, state=incremental_state.setdefault(f"lsq_layer_{index}", {}))
            states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x.transpose(0, 1), {"attn": [None], "inner_states": states}

    def output_layer(self, features: Tensor) -> Tensor:
        """features float32 [B, T, H] -> logits float32 [B, T, V]."""
        return self.output_projection(features)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Keep the sentences `new_order` int64 [B'] of every layer's keys and values, in place."""
        for index in range(len(self.layers)):
            state = incremental_state.get(f"lsq_layer_{index}", {})
            for name, tensor in state.items():
                state[name] = tensor.index_select(0, new_order)

    def max_positions(self) -> int:
        """The longest target sentence."""
        return self.embed_tokens.max_positions
