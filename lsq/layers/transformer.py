"""Transformer layers as modules, and their blocks as modules of their own.

T time, B sentences, S time of encoder output, H hidden size, M packed tokens.
"""

import torch

from lsq.config import LayerConfig
from lsq.layers import decoding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.decoding import State
from lsq.layers.module import ProgramModule, beside_the_graph, rows_of
from lsq.layers.packing import (
    Packing,
    check_memory,
    pack_time_major,
    packing_options,
    unpack_time_major,
)
from lsq.layers.positions import position_inputs

ONE = PackedSequences(rows=1, count=1)


class FeedForward(ProgramModule):
    """fc2(dropout(activation(fc1(x)))) in int8: float32 [..., H] -> [..., H].

    With config.gated: fc2(dropout(activation(gate(x)) * up(x))), SwiGLU with "silu" (Shazeer 2020).
    """

    def __init__(self, config: LayerConfig):
        super().__init__(config.quant)
        self.config = config
        self.declare(lambda mode: programs.feed_forward(config, 1, mode))

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = rows_of(x, self.config.hidden)
        program = programs.feed_forward(self.config, rows.shape[0], self.mode(x))
        (y,) = self.execute(program, {"x": rows})
        return y.view(x.shape)


class MultiheadAttention(ProgramModule):
    """Multi-head attention in int8 (Vaswani et al. 2017), initialised as in fairseq.

    `cross`: attend to encoder output, without rotary embeddings and relative biases.
    """

    def __init__(self, config: LayerConfig, *, cross: bool = False):
        super().__init__(config.quant)
        self.config, self.cross, causal = config, cross, config.window is not None
        if cross:
            self.declare(lambda mode: programs.cross_attention(config, ONE, ONE, mode))
        else:
            self.declare(lambda mode: programs.self_attention(config, ONE, mode, causal=causal))

    @beside_the_graph
    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Attend: x float32 [T, B, H] -> [T, B, H], zero in padding of x.

        `memory`: encoder output [S, B, H], if and only if `cross`. `key_padding_mask`: bool [B, T],
        or [B, S] of the memory; True is padding. Raises ValueError for other shapes, an empty
        batch, and a memory that is missing or not wanted.
        """
        if self.cross != (memory is not None):
            raise ValueError(
                f"cross is {self.cross}, but a memory was {'not ' if memory is None else ''}given"
            )
        config, options = self.config, packing_options(self)
        own_mask = None if self.cross else key_padding_mask
        rows, packing = pack_time_major(x, own_mask, config.hidden, **options)
        inputs = {"x": rows, "cu_seqlens": packing.cu_seqlens}
        if memory is None:
            program = programs.self_attention(
                config, packing.sentences, self.mode(x), causal=causal
            )
            inputs |= position_inputs(config, packing.positions, packing.shape[1], causal=causal)
        else:
            check_memory(memory, x)
            source, of_source = pack_time_major(memory, key_padding_mask, config.hidden, **options)
            program = programs.cross_attention(
                config, packing.sentences, of_source.sentences, self.mode(x, memory)
            )
            inputs |= {"memory": source, "memory_cu_seqlens": of_source.cu_seqlens}
        (y,) = self.execute(program, inputs)
        return unpack_time_major(y, packing)


class TransformerEncoderLayer(ProgramModule):
    """One encoder layer, pre- or post-norm; `causal`: a token sees no later tokens."""

    def __init__(self, config: LayerConfig, *, causal: bool = False):
        super().__init__(config.quant)
        self.config, self.causal = config, causal
        self.declare(lambda mode: programs.encoder_layer(config, ONE, mode, causal=causal))

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run on x float32 [T, B, H] -> [T, B, H], zero in padding.

        `key_padding_mask`: bool [B, T], True is padding. Other shapes are a ValueError.
        """
        rows, packing = pack_time_major(
            x, key_padding_mask, self.config.hidden, **packing_options(self)
        )
        return unpack_time_major(self.rows(rows, packing), packing)

    @beside_the_graph
    def rows(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Run on packed tokens: x float32 [M, H] -> [M, H]."""
        config, causal = self.config, self.causal
        program = programs.encoder_layer(config, packing.sentences, self.mode(x), causal=causal)
        positions = position_inputs(config, packing.positions, packing.shape[1], causal=causal)
        (y,) = self.execute(program, {"x": x, "cu_seqlens": packing.cu_seqlens, **positions})
        return y

    @beside_the_graph
    @torch.no_grad()
    def step(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """Run a causal layer on the next word of each sentence: x float32 [B, H] -> [B, H].

        `state`, an empty dict at first, keeps what the next step needs. Raises ValueError if the
        layer is not causal or in training mode, or if its clips were never measured.
        """
        if not self.causal:
            raise ValueError(
                "a layer whose words see those after them cannot decode; make it with causal=True"
            )
        decoding.check_ready(self)
        past, inputs = decoding.step_inputs(state, x, self.config, self.target)
        program = decoding.encoder_step(self.config, past, len(x), self.mode())
        y, history = self.execute(program, inputs)
        decoding.keep_history(state, history)
        return y


class TransformerDecoderLayer(ProgramModule):
    """One decoder layer, pre- or post-norm."""

    def __init__(self, config: LayerConfig):
        super().__init__(config.quant)
        self.config = config
        self.declare(lambda mode: programs.decoder_layer(config, ONE, ONE, mode))

    def forward(
        self,
        x: torch.Tensor,
        encoder_out: torch.Tensor,
        encoder_padding_mask: torch.Tensor | None = None,
        *,
        self_padding_mask: torch.Tensor | None = None,
        state: State | None = None,
    ) -> torch.Tensor:
        """Run causally on x float32 [T, B, H] -> [T, B, H], zero in padding of x.

        Args:
            encoder_out: encoder output [S, B, H].
            encoder_padding_mask, self_padding_mask: bool [B, S] and [B, T], True is padding.
            state: for decoding step by step, an empty dict at first; x then is one step [1, B, H].

        Raises:
            ValueError: other shapes, or an empty batch; with `state` also training mode, more than
                one step, or clips that were never measured.
        """
        width, options = self.config.hidden, packing_options(self)
        rows, packing = pack_time_major(x, self_padding_mask, width, **options)
        if state is None:
            check_memory(encoder_out, x)
            memory = pack_time_major(encoder_out, encoder_padding_mask, width, **options)
            return unpack_time_major(self.rows(rows, packing, *memory), packing)
        if x.shape[:2] != (1, encoder_out.shape[1]):
            raise ValueError(
                f"incremental decoding takes one step [1, {encoder_out.shape[1]}, {width}] at a"
                f" time; given {tuple(x.shape)}"
            )
        return unpack_time_major(self.step(rows, encoder_out, encoder_padding_mask, state), packing)

    @beside_the_graph
    def rows(
        self, x: torch.Tensor, packing: Packing, memory: torch.Tensor, memory_packing: Packing
    ) -> torch.Tensor:
        """Run on packed tokens: x float32 [M, H], memory [S, H] -> [M, H]."""
        program = programs.decoder_layer(
            self.config, packing.sentences, memory_packing.sentences, self.mode(x, memory)
        )
        inputs = {
            "x": x,
            "cu_seqlens": packing.cu_seqlens,
            "memory": memory,
            "memory_cu_seqlens": memory_packing.cu_seqlens,
        }
        inputs |= position_inputs(self.config, packing.positions, packing.shape[1], causal=True)
        (y,) = self.execute(program, inputs)
        return y

    @beside_the_graph
    @torch.no_grad()
    def step(
        self, x: torch.Tensor, encoder_out: torch.Tensor, padding: torch.Tensor | None, state: State
    ) -> torch.Tensor:
        """Run one step: x float32 [B, H], encoder_out [S, B, H], padding bool [B, S] -> [B, H]."""
        decoding.check_ready(self)
        config, mode, (source, batch, hidden) = self.config, self.mode(), encoder_out.shape
        if not state:
            program = decoding.decoder_memory(config, batch * source, mode)
            memory = encoder_out.transpose(0, 1).reshape(batch * source, hidden)
            cross, *scale = self.execute(program, {"memory": memory})
            state["cross"] = cross.view(batch, source, -1)
            if scale:
                state["cross_scale"] = scale[0]
        memory_packing = Packing(padding, shape=(batch, source), backend=self.target)
        past, inputs = decoding.step_inputs(state, x, config, self.target)
        inputs["cross"] = memory_packing.pack(state["cross"])
        inputs["source_cu_seqlens"] = memory_packing.cu_seqlens
        if "cross_scale" in state:
            inputs["cross_scale"] = state["cross_scale"]
        program = decoding.decoder_step(config, past, memory_packing.sentences, mode)
        y, history = self.execute(program, inputs)
        decoding.keep_history(state, history)
        return y
