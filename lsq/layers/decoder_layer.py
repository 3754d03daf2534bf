"""TransformerDecoderLayer: self-attention, attention over the encoder's output and feed-forward in
one program."""

import torch

from lsq.config import LayerConfig
from lsq.layers import decoding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.decoding import State
from lsq.layers.module import ProgramModule
from lsq.layers.packing import (
    Packing,
    check_memory,
    pack_time_major,
    packing_options,
    unpack_time_major,
)
from lsq.layers.positions import position_inputs
from lsq.layers.torch_compile import beside_the_graph


class TransformerDecoderLayer(ProgramModule):
    """One decoder layer, pre- or post-norm, with dropout wherever fairseq has it."""

    def __init__(self, config: LayerConfig):
        super().__init__(config.quant)
        self.config = config
        one = PackedSequences(rows=1, count=1)
        self.declare(lambda mode: programs.decoder_layer(config, one, one, mode))

    def forward(
        self,
        x: torch.Tensor,
        encoder_out: torch.Tensor,
        encoder_padding_mask: torch.Tensor | None = None,
        *,
        self_padding_mask: torch.Tensor | None = None,
        state: State | None = None,
    ) -> torch.Tensor:
        """x float32 [T, B, H], encoder_out [S, B, H], encoder_padding_mask bool [B, S] -> float32
        [T, B, H].

        Without `state` the whole target is there and the future is masked. With a state (an empty
        dict at first) x is one step [1, B, H]; the layer keeps what the next step needs in the
        state, a row for each sentence. Results are zero where `self_padding_mask` bool [B, T] says
        padding.

        Raises:
            ValueError: another shape, no sentence or no word; a state in training mode, with more
                than one step, or before calibration.
        """
        options = packing_options(self)
        rows, packing = pack_time_major(x, self_padding_mask, self.config.hidden, **options)
        if state is not None:
            if x.shape[:2] != (1, encoder_out.shape[1]):
                raise ValueError(
                    f"incremental decoding takes one step [1, {encoder_out.shape[1]},"
                    f" {self.config.hidden}] at a time; given {tuple(x.shape)}"
                )
            return unpack_time_major(
                self.step(rows, encoder_out, encoder_padding_mask, state), packing
            )
        check_memory(encoder_out, x)
        memory, memory_packing = pack_time_major(
            encoder_out, encoder_padding_mask, self.config.hidden, **options
        )
        return unpack_time_major(self.rows(rows, packing, memory, memory_packing), packing)

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
        """One step of decoding: x float32 [B, H], encoder_out [S, B, H], padding bool [B, S] or
        None -> [B, H].

        Raises:
            ValueError: training mode, or clips that were never measured.
        """
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
        inputs |= {
            "cross": memory_packing.pack(state["cross"]),
            "source_cu_seqlens": memory_packing.cu_seqlens,
        }
        if "cross_scale" in state:
            inputs["cross_scale"] = state["cross_scale"]
        y, history = self.execute(
            decoding.decoder_step(config, past, memory_packing.sentences, mode), inputs
        )
        decoding.keep_history(state, history)
        return y
