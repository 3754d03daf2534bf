"""Encoders and decoders behind fairseq's interface.

B batch, S source time, T target time, M packed words, H hidden, V vocabulary.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder, FairseqIncrementalDecoder
from fairseq.models.transformer import TransformerEncoder
from torch import Tensor, nn

from lsq.config import LayerConfig
from lsq.fairseq.options import layer_config, quantization
from lsq.layers import (
    Embedding,
    Packing,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
    programs,
    unpack_time_major,
)
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import ALONE
from lsq.layers.model_formats import config_at
from lsq.layers.packing import packing_options
from lsq.layers.stack import Stack

IncrementalState = dict[str, dict[str, Tensor]]


def layer_configs(args: Any, side: str, *, cross: bool = False) -> list[LayerConfig]:
    """List the configurations of a side's layers; `cross`: they also attend to an encoder."""
    config, one = layer_config(args, side), PackedSequences(rows=1, count=1)
    build = (
        partial(programs.decoder_layer, config, one, one)
        if cross
        else partial(programs.encoder_layer, config, one)
    )
    count = getattr(args, f"{side}_layers")
    return [config_at(config, f"{side}.layers.{number}", build) for number in range(count)]


class FairseqStack(Stack):
    """Embedding, layers, and under pre-norm a final LayerNorm; a base class before fairseq's class.

    Args:
        args: fairseq's options of the model.
        side: "encoder" or "decoder".
        dictionary: the words.
        weight: table of words [V, H], which other modules may share.
        layers: between embedding and norm.
    """

    def __init__(
        self,
        args: Any,
        side: str,
        dictionary: Dictionary,
        weight: nn.Parameter,
        layers: Iterable[nn.Module],
    ):
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        source = side == "encoder"
        self.embed_tokens = Embedding(
            *weight.shape,
            self.padding_idx,
            positions="learned" if getattr(args, f"{side}_learned_pos") else "sinusoidal",
            max_positions=args.max_source_positions if source else args.max_target_positions,
            dropout=float(args.dropout),
            scale=1.0 if args.no_scale_embedding else None,
            layer_norm=args.layernorm_embedding,
        )
        self.embed_tokens.weight = weight
        self.layers = nn.ModuleList(layers)
        normed = getattr(args, f"{side}_normalize_before") and (
            source or not getattr(args, "no_decoder_final_norm", False)
        )
        self.layer_norm = nn.LayerNorm(weight.shape[1]) if normed else None

    def max_positions(self) -> int:
        return self.embed_tokens.max_positions


class LSQTransformerEncoder(FairseqStack, FairseqEncoder):
    """The encoder of a translation model."""

    reorder_encoder_out = TransformerEncoder.reorder_encoder_out

    def __init__(self, args: Any, dictionary: Dictionary, weight: nn.Parameter):
        layers = map(TransformerEncoderLayer, layer_configs(args, "encoder"))
        super().__init__(args, "encoder", dictionary, weight, layers)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> dict[str, list[Tensor]]:
        """Encode src_tokens int64 [B, S] as fairseq's decoders and generators expect it.

        Returns:
            encoder_out: [float32 [S, B, H]], zero in padding.
            encoder_padding_mask: [bool [B, S]], True is padding.
            encoder_states: the input of the first layer and every layer's output, zero in padding;
                empty without `return_all_hiddens`.
            src_lengths: [int32 [B, 1]].
            encoder_embedding, fc_results, src_tokens: empty.
        """
        padding = src_tokens.eq(self.padding_idx)
        packing = Packing(padding, **packing_options(self))
        *inner, x = self.rows(src_tokens, packing)
        kept = inner if return_all_hiddens else []
        return {
            "encoder_out": [unpack_time_major(x, packing)],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [],
            "encoder_states": [unpack_time_major(state, packing) for state in kept],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~padding).sum(dim=1, keepdim=True, dtype=torch.int32)],
        }


class LSQDecoder(FairseqStack, FairseqIncrementalDecoder):
    """A stack and the projection onto the vocabulary; by itself the decoder of a language model."""

    def __init__(
        self, args: Any, dictionary: Dictionary, weight: nn.Parameter, layers: Iterable[nn.Module]
    ):
        super().__init__(args, "decoder", dictionary, weight, layers)
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
        """Return logits float32 [B, T, V], or features [B, T, H] if `features_only`, and extra
        outputs. With an incremental state, only the last token counts and T is 1."""
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
        """Return features float32 [B, T, H] of prev_output_tokens int64 [B, T], and {"attn":
        [None], "inner_states": [...]}; ValueError if attention weights are wanted."""
        if full_context_alignment or alignment_layer is not None or alignment_heads is not None:
            raise ValueError(
                "lsq_transformer keeps no attention weights: full_context_alignment,"
                " alignment_layer and alignment_heads are not supported; leave them out"
            )
        if incremental_state is not None:
            packing = Packing(shape=(len(prev_output_tokens), 1), **packing_options(self))
            states = self.step(
                prev_output_tokens, incremental_state, *self.encoded_for_steps(encoder_out)
            )
        else:
            packing = Packing(prev_output_tokens.eq(self.padding_idx), **packing_options(self))
            states = self.rows(prev_output_tokens, packing, *self.encoded_for_rows(encoder_out))
        *inner, x = (packing.unpack(state) for state in states)
        return x, {"attn": [None], "inner_states": [state.transpose(0, 1) for state in inner]}

    def encoded_for_rows(self, encoder_out: dict[str, list[Tensor]] | None) -> tuple:
        """Return arguments of a layer's `rows` after x and packing; none without an encoder."""
        return ()

    def encoded_for_steps(self, encoder_out: dict[str, list[Tensor]] | None) -> tuple:
        """Return arguments of a layer's `step` after x and state; none without an encoder."""
        return ()

    def loss(
        self, features: Tensor, targets: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, nll_loss, features) for features float32 [M, H] and targets int64 [M].
        Losses are sums over the targets that are not padding; the logits are never stored."""
        return *self.output_projection.loss(features, targets, label_smoothing), features

    def output_layer(self, features: Tensor) -> Tensor:
        return self.output_projection(features)

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor
    ) -> None:
        self.reorder(incremental_state, new_order)


class LSQTransformerDecoder(LSQDecoder):
    """The decoder of a translation model: its layers attend to the encoder output, too."""

    def __init__(self, args: Any, dictionary: Dictionary, weight: nn.Parameter):
        layers = map(TransformerDecoderLayer, layer_configs(args, "decoder", cross=True))
        super().__init__(args, dictionary, weight, layers)

    def encoded_for_rows(self, encoder_out: dict[str, list[Tensor]]) -> tuple[Tensor, Packing]:
        packing = Packing(encoder_out["encoder_padding_mask"][0], **packing_options(self))
        return packing.pack(encoder_out["encoder_out"][0].transpose(0, 1)), packing

    def encoded_for_steps(self, encoder_out: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        return encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
