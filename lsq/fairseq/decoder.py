"""The decoder behind fairseq's interface. B batch, T target time, H hidden, V vocabulary."""

from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from lsq.fairseq.encoder import build_embedding, final_norm
from lsq.fairseq.options import layer_config, quantization
from lsq.layers import Packing, TransformerDecoderLayer, VocabularyProjection
from lsq.layers.decoding import reorder

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
        if incremental_state is not None:
            packing = Packing(shape=prev_output_tokens.shape)
            states = self._step(prev_output_tokens, packing, offset, memory, memory_padding, incremental_state)
        else:
            packing = Packing(prev_output_tokens.eq(self.padding_idx))
            memory_packing = Packing(memory_padding)
            rows = memory_packing.pack(memory.transpose(0, 1))
            states = self.rows(prev_output_tokens, packing, rows, memory_packing)
        *inner, x = (packing.unpack(state) for state in states)
        return x, {"attn": [None], "inner_states": [state.transpose(0, 1) for state in inner]}

    def rows(self, tokens: Tensor, packing: Packing, memory: Tensor, memory_packing: Packing) -> list[Tensor]:
        """tokens int64 [B, T] and an encoder's rows float32 [S, H] -> packed rows [M, H]: the input of the first layer,
        every layer's output, and the features."""
        states = [self.embed_tokens.rows(tokens, packing)]
        for layer in self.layers:
            states.append(layer.rows(states[-1], packing, memory, memory_packing))
        return [*states, self._normalised(states[-1])]

    def _step(self, tokens, packing, offset, memory, memory_padding, incremental_state) -> list[Tensor]:
        # An empty sentence may begin with padding; its row is computed like any other.
        states = [self.embed_tokens.rows(tokens, packing, offset)]
        for index, layer in enumerate(self.layers):
            state = incremental_state.setdefault(f"lsq_layer_{index}", {})
            states.append(layer.step(states[-1], memory, memory_padding, state))
        return [*states, self._normalised(states[-1])]

    def _normalised(self, x: Tensor) -> Tensor:
        return x if self.layer_norm is None else self.layer_norm(x)

    def output_layer(self, features: Tensor) -> Tensor:
        """features float32 [B, T, H] -> logits float32 [B, T, V]."""
        return self.output_projection(features)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Keep the sentences `new_order` int64 [B'] of every layer's keys and values, in place."""
        for index in range(len(self.layers)):
            reorder(incremental_state.get(f"lsq_layer_{index}", {}), new_order)

    def max_positions(self) -> int:
        """The longest target sentence."""
        return self.embed_tokens.max_positions
