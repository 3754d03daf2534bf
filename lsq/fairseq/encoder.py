"""The encoder behind fairseq's interface. B batch, S source time, H hidden, V vocabulary."""

from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from fairseq.models.transformer import TransformerEncoder
from torch import Tensor, nn

from lsq.fairseq.options import layer_config
from lsq.fairseq.stack import FairseqStack, build_embedding, configs_of, final_norm
from lsq.layers import Packing, TransformerEncoderLayer, unpack_time_major
from lsq.layers.packing import packing_options


class LSQTransformerEncoder(FairseqStack, FairseqEncoder):
    """Embedding, encoder layers and, under pre-norm, a final LayerNorm.

    Args:
        args: fairseq's options of the model.
        dictionary: the source words.
        weight: the words' rows [V, H].
    """

    reorder_encoder_out = TransformerEncoder.reorder_encoder_out

    def __init__(self, args: Any, dictionary: Dictionary, weight: nn.Parameter):
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.embed_tokens = build_embedding(args, "encoder", self.padding_idx, weight)
        config = layer_config(args, "encoder")
        self.layers = nn.ModuleList(
            map(TransformerEncoderLayer, configs_of(config, args.encoder_layers, "encoder"))
        )
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
            encoder_states: the input of the first layer and every layer's output, if
                `return_all_hiddens`. All are zero where there is padding.
            src_lengths: [int32 [B, 1]].
            encoder_embedding, fc_results, src_tokens: empty.

        Raises:
            ValueError: the tokens are not on the device of the parameters.
        """
        padding = src_tokens.eq(self.padding_idx)
        packing = Packing(padding, **packing_options(self))
        states = self.rows(src_tokens, packing)
        return {
            "encoder_out": [unpack_time_major(states[-1], packing)],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [],
            "encoder_states": [unpack_time_major(x, packing) for x in states[:-1]]
            if return_all_hiddens
            else [],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~padding).sum(dim=1, keepdim=True, dtype=torch.int32)],
        }
