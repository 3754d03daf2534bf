"""TransformerDecoderLayer: self-attention, attention over the encoder's output and feed-forward in one program."""

import torch
from torch import nn

from lsq.config import LayerConfig
from lsq.layers.attention import MultiheadAttention
from lsq.layers.feed_forward import FeedForward
from lsq.layers.module import ProgramModule, beside_the_graph, key_padding, rows_of, time_and_batch
from lsq.program import layers as programs


class TransformerDecoderLayer(ProgramModule):
    """One decoder layer, pre- or post-norm, with dropout wherever fairseq has it."""

    def __init__(self, config: LayerConfig):
        super().__init__(config.quant)
        self.config = config
        self.self_attn = MultiheadAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden, config.layer_norm_epsilon)
        self.encoder_attn = MultiheadAttention(config, cross=True)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.hidden, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden, config.layer_norm_epsilon)

    @beside_the_graph
    def forward(
        self,
        x: torch.Tensor,
        encoder_out: torch.Tensor,
        encoder_padding_mask: torch.Tensor | None = None,
        *,
        self_padding_mask: torch.Tensor | None = None,
        state: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x float32 [T, B, H], encoder_out [S, B, H], encoder_padding_mask bool [B, S] -> float32 [T, B, H].

        Without `state` the whole target is there and the future is masked. With a state (an empty dict at first) x is
        one step [1, B, H]; the layer keeps its keys and values in the state, each [B, heads, time, width].

        Raises:
            ValueError: another shape, no sentence or no word; a state in training mode, with more than one step, or
                before calibration.
        """
        time, batch = time_and_batch(x, self.config.hidden)
        inputs = {"x": rows_of(x, self.config.hidden)}
        mask = key_padding(encoder_padding_mask)
        if mask is not None:
            inputs["padding"] = mask
        if state is not None:
            return self._step(inputs, encoder_out, state).view(x.shape)
        inputs["memory"] = rows_of(encoder_out, self.config.hidden)
        self_mask = key_padding(self_padding_mask)
        if self_mask is not None:
            inputs["self_padding"] = self_mask
        program = programs.decoder_layer(
            self.config, batch, time, encoder_out.shape[0], mask is not None, self_mask is not None, self.training,
            self.wants_backward(x, encoder_out),
        )
        (y,) = self.execute(program, inputs)
        return y.view(x.shape)

    def _step(self, inputs, encoder_out, state) -> torch.Tensor:
        config, source = self.config, encoder_out.shape[0]
        batch = encoder_out.shape[1]
        if self.training or inputs["x"].shape[0] != batch:
            raise ValueError(
                f"incremental decoding takes one step [1, {batch}, {config.hidden}] in eval mode; given "
                f"{inputs['x'].shape[0]} rows, training {self.training}"
            )
        if config.quant.quantized and not self.calibrated:
            raise ValueError(
                "incremental decoding needs clips that have been measured: load a trained checkpoint, or run the layer "
                "once on a whole target"
            )
        with torch.no_grad():
            if not state:
                memory = rows_of(encoder_out, config.hidden)
                program = programs.decoder_memory(config, batch, source)
                state["cross_key"], state["cross_value"] = self.execute(program, {"memory": memory})
                state["key"] = state["value"] = torch.empty(batch, config.heads, 0, config.hidden // config.heads)
            program = programs.decoder_step(config, batch, state["key"].shape[2], source, "padding" in inputs)
            y, state["key"], state["value"] = self.execute(program, {**inputs, **state})
        return y
