"""Decoders behind fairseq's interface.

B batch, T target time, M packed words, H hidden, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from lsq.fairseq.options import layer_config, quantization
from lsq.fairseq.stack import FairseqStack, build_embedding, configs_of, final_norm
from lsq.layers import Packing, TransformerDecoderLayer, VocabularyProjection
from lsq.layers.linear import ALONE
from lsq.layers.packing import packing_options

IncrementalState = dict[str, dict[str, Tensor]]


class LSQDecoder(FairseqStack, FairseqIncrementalDecoder):
    """Embedding, layers, under pre-norm a final LayerNorm, and the projection onto the vocabulary.

    Args:
        args: fairseq's options of the model.
        dictionary: the target words.
        weight: the words' rows [V, H], shared with the projection if the options say so.
        layers: what stands between.
    """

    def __init__(
        self, args: Any, dictionary: Dictionary, weight: nn.Parameter, layers: Iterable[nn.Module]
    ):
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embed_tokens = build_embedding(args, "decoder", self.padding_idx, weight)
        self.layers = nn.ModuleList(layers)
        self.layer_norm = final_norm(args, "decoder")
        self.output_projection = VocabularyProjection(
            len(dictionary),
            weight.shape[1],
            quant=quantization(args).at("decoder.output_projection", *ALONE),
            weight=weight if args.share_decoder_input_output_embed else None,
            padding_idx=self.padding_idx,
        )

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: IncrementalState | None = None,
        features_only: bool = False,
        **options,
    ) -> tuple[Tensor, dict[str, list]]:
        """Logits float32 [B, T, V], or features [B, T, H] if `features_only`, and extra outputs.

        With an incremental state, only the last token counts and T is 1. `options`: as
        `extract_features` takes them.
        """
        x, extra = self.extract_features(
            prev_output_tokens, encoder_out, incremental_state, **options
        )
        return (x if features_only else self.output_layer(x)), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: IncrementalState | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, dict[str, list]]:
        """prev_output_tokens int64 [B, T] -> features float32 [B, T, H], {"attn": [None],
        "inner_states": [...]}.

        Raises:
            ValueError: attention weights or an unmasked future are wanted.
        """
        if full_context_alignment or alignment_layer is not None or alignment_heads is not None:
            raise ValueError(
                "lsq_transformer keeps no attention weights: full_context_alignment,"
                " alignment_layer and "
                "alignment_heads are not supported; leave them out"
            )
        if incremental_state is not None:
            packing = Packing(shape=(len(prev_output_tokens), 1), **packing_options(self))
            states = self.step(
                prev_output_tokens, incremental_state, *self.memory_of_steps(encoder_out)
            )
        else:
            packing = Packing(prev_output_tokens.eq(self.padding_idx), **packing_options(self))
            states = self.rows(prev_output_tokens, packing, *self.memory_of_rows(encoder_out))
        *inner, x = (packing.unpack(state) for state in states)
        return x, {"attn": [None], "inner_states": [state.transpose(0, 1) for state in inner]}

    def memory_of_rows(self, encoder_out: dict[str, list[Tensor]] | None) -> tuple:
        """What `rows` of a layer takes beside x and its packing; nothing without an encoder."""
        return ()

    def memory_of_steps(self, encoder_out: dict[str, list[Tensor]] | None) -> tuple:
        """What `step` of a layer takes beside x and its state; nothing without an encoder."""
        return ()

    def loss(
        self, features: Tensor, targets: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, nll_loss, features) of features float32 [M, H] and targets int64 [M]; the logits
        are never stored.

        The losses are summed over the targets that are not padding.
        """
        return *self.output_projection.loss(features, targets, label_smoothing), features

    def output_layer(self, features: Tensor) -> Tensor:
        """features float32 [B, T, H] -> logits float32 [B, T, V]."""
        return self.output_projection(features)

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor
    ) -> None:
        """Keep the sentences `new_order` int64 [B'] of every layer's keys and values, in place."""
        self.reorder(incremental_state, new_order)


class LSQTransformerDecoder(LSQDecoder):
    """The decoder of a translation model: its layers attend to what the encoder made, too."""

    def __init__(self, args: Any, dictionary: Dictionary, weight: nn.Parameter):
        config = layer_config(args, "decoder")
        layers = map(
            TransformerDecoderLayer, configs_of(config, args.decoder_layers, "decoder", memory=True)
        )
        super().__init__(args, dictionary, weight, layers)

    def memory_of_rows(self, encoder_out: dict[str, list[Tensor]]) -> tuple[Tensor, Packing]:
        """The encoder's rows [S, H] and how they are packed."""
        packing = Packing(encoder_out["encoder_padding_mask"][0], **packing_options(self))
        return packing.pack(encoder_out["encoder_out"][0].transpose(0, 1)), packing

    def memory_of_steps(self, encoder_out: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        """The encoder's output [S, B, H] and its padding [B, S]."""
        return encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
