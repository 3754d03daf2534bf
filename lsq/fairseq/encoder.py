"""The encoder behind fairseq's interface. B batch, S source time, H hidden, V vocabulary."""

from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from lsq.fairseq.options import layer_config
from lsq.layers import Embedding, Packing, TransformerEncoderLayer, unpack_time_major


def build_embedding(args: Any, side: str, dictionary: Dictionary, weight: nn.Parameter) -> Embedding:
    """Words and positions of one side, "encoder" or "decoder"; `weight` [V, H] may be shared with others."""
    embedding = Embedding(
        len(dictionary),
        weight.shape[1],
        dictionary.pad(),
        positions="learned" if getattr(args, f"{side}_learned_pos") else "sinusoidal",
        max_positions=args.max_source_positions if side == "encoder" else args.max_target_positions,
        dropout=float(args.dropout),
        scale=1.0 if args.no_scale_embedding else None,
        layer_norm=args.layernorm_embedding,
    )
    embedding.weight = weight
    return embedding


def final_norm(args: Any, side: str) -> nn.LayerNorm | None:
    """The LayerNorm after the last layer; pre-norm stacks have one."""
    if not getattr(args, f"{side}_normalize_before"):
        return None
    if side == "decoder" and safe_getattr(args, "no_decoder_final_norm", False):
        return None
    return nn.LayerNorm(getattr(args, f"{side}_embed_dim"))


class LSQTransformerEncoder(FairseqEncoder):
    """Embedding, encoder layers and, under pre-norm, a final LayerNorm.

    Args:
        args: fairseq's options of the model.
        dictionary: the source words.
        weight: the words' rows [V, H].
    """

    def __init__(self, args: Any, dictionary: Dictionary, weight: nn.Parameter):
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embed_tokens = build_embedding(args, "encoder", dictionary, weight)
        config = layer_config(args, "encoder")
        self.layers = nn.ModuleList(TransformerEncoderLayer(config) for _ in range(args.encoder_layers))
        self.layer_norm = final_norm(args, "encoder")

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> dict[str, list[Tensor]]:
        """src_tokens int64 [B, S] -> what fairseq's decoders and generators expect of an encoder.

        Returns:
            encoder_out: [float32 [S, B, H]].
            encoder_padding_mask: [bool [B, S]], True is padding.
            encoder_states: the input of the first layer and every layer's output, if `return_all_hiddens`. All are zero
                where there is padding.
            src_lengths: [int32 [B, 1]].
            encoder_embedding, fc_results, src_tokens: empty.

        Raises:
            ValueError: the tokens are not on the CPU.
        """
        padding = src_tokens.eq(self.padding_idx)
        packing = Packing(padding)
        states = self.rows(src_tokens, packing)
        return {
            "encoder_out": [unpack_time_major(states[-1], packing)],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [],
            "encoder_states": [unpack_time_major(x, packing) for x in states[:-1]] if return_all_hiddens else [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~padding).sum(dim=1, keepdim=True, dtype=torch.int32)],
        }

    def rows(self, src_tokens: Tensor, packing: Packing) -> list[Tensor]:
        """The same on packed rows float32 [M, H]: the input of the first layer, every layer's output, and the result.

        Raises:
            ValueError: the tokens are not on the CPU.
        """
        if src_tokens.device.type != "cpu":
            raise ValueError(
                f"lsq_transformer runs on the CPU, but the batch is on {src_tokens.device}; add the option --cpu"
            )
        states = [self.embed_tokens.rows(src_tokens, packing)]
        for layer in self.layers:
            states.append(layer.rows(states[-1], packing))
        last = states[-1]
        return [*states, last if self.layer_norm is None else self.layer_norm(last)]

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor) -> dict[str, list[Tensor]]:
        """The sentences `new_order` int64 [B'] of an output of `forward`."""
        time_major = ("encoder_out", "encoder_states")
        return {
            name: [tensor.index_select(1 if name in time_major else 0, new_order) for tensor in tensors]
            for name, tensors in encoder_out.items()
        }

    def max_positions(self) -> int:
        """The longest source sentence."""
        return self.embed_tokens.max_positions
