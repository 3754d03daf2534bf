"""TransformerEncoderLayer: self-attention and feed-forward in one program."""

import torch
from torch import nn

from lsq.config import LayerConfig
from lsq.layers.attention import MultiheadAttention
from lsq.layers.feed_forward import FeedForward
from lsq.layers.module import ProgramModule, beside_the_graph, key_padding, rows_of, time_and_batch
from lsq.program import layers as programs


class TransformerEncoderLayer(ProgramModule):
    """One encoder layer, pre- or post-norm, with dropout wherever fairseq has it."""

    def __init__(self, config: LayerConfig):
        super().__init__(config.quant)
        self.config = config
        self.self_attn = MultiheadAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden, config.layer_norm_epsilon)

    @beside_the_graph
    def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x float32 [T, B, H], key_padding_mask bool [B, T], True is padding -> float32 [T, B, H].

        Raises:
            ValueError: another shape, no sentence, or no word.
        """
        time, batch = time_and_batch(x, self.config.hidden)
        mask = key_padding(key_padding_mask)
        program = programs.encoder_layer(
            self.config, batch, time, mask is not None, self.training, self.wants_backward(x)
        )
        inputs = {"x": rows_of(x, self.config.hidden)}
        if mask is not None:
            inputs["padding"] = mask
        (y,) = self.execute(program, inputs)
        return y.view(x.shape)
