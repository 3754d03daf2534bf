"""MultiheadAttention: over the input itself, or over a memory."""

import math

import torch
from torch import nn

from lsq.config import LayerConfig
from lsq.layers.module import ProgramModule, beside_the_graph, initialise_uniform, key_padding, rows_of, time_and_batch
from lsq.program import layers as programs


class MultiheadAttention(ProgramModule):
    """Multi-head attention with int8 projections (Vaswani et al. 2017), initialised as fairseq does.

    Args:
        config: width, heads and dropout.
        cross: attend over a memory instead of the input itself.
    """

    def __init__(self, config: LayerConfig, *, cross: bool = False):
        super().__init__(config.quant)
        self.config, self.cross = config, cross
        hidden = config.hidden
        if cross:
            self._add_projection("query", 1)
            self._add_projection("key_value", 2)
            self.add_activation_clips("input", "memory", "query", "key_value", "context", "out")
        else:
            self._add_projection("qkv", 3)
            self.add_activation_clips("input", "qkv", "context", "out")
        nn.init.xavier_uniform_(self.add_weight("out_weight", hidden, hidden))
        self.add_bias("out_bias", hidden)
        self.calibrate_weights()

    def _add_projection(self, name: str, parts: int) -> None:
        hidden = self.config.hidden
        weight = self.add_weight(name + "_weight", parts * hidden, hidden)
        for part in weight.data.chunk(parts):
            nn.init.xavier_uniform_(part, gain=1.0 / math.sqrt(2.0))
        initialise_uniform(self.add_bias(name + "_bias", parts * hidden), hidden)

    @beside_the_graph
    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
    ) -> torch.Tensor:
        """x float32 [T, B, H], memory [S, B, H] if cross; key_padding_mask bool [B, S], True is padding -> [T, B, H].

        Raises:
            ValueError: a memory is missing or not wanted; another shape, no sentence, or no word.
        """
        if self.cross != (memory is not None):
            raise ValueError(f"cross is {self.cross}, but a memory was {'not ' if memory is None else ''}given")
        time, batch = time_and_batch(x, self.config.hidden)
        mask = key_padding(key_padding_mask)
        inputs = {"x": rows_of(x, self.config.hidden)}
        if mask is not None:
            inputs["padding"] = mask
        if memory is None:
            backward = self.wants_backward(x)
            program = programs.self_attention(
                self.config, batch, time, mask is not None, causal, self.training, backward
            )
        else:
            backward = self.wants_backward(x, memory)
            program = programs.cross_attention(
                self.config, batch, time, memory.shape[0], mask is not None, self.training, backward
            )
            inputs["memory"] = rows_of(memory, self.config.hidden)
        (y,) = self.execute(program, inputs)
        return y.view(x.shape)
