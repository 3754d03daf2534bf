"""TransformerEncoderLayer: self-attention and feed-forward in one program."""

import torch

from lsq.config import LayerConfig
from lsq.layers import decoding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.decoding import State
from lsq.layers.module import ProgramModule
from lsq.layers.packing import Packing, pack_time_major, packing_options, unpack_time_major
from lsq.layers.positions import position_inputs
from lsq.layers.torch_compile import beside_the_graph


class TransformerEncoderLayer(ProgramModule):
    """One encoder layer, pre- or post-norm, with dropout wherever fairseq has it.

    Args:
        config: shape and behaviour.
        causal: words see those before them alone, as in a language model.
    """

    def __init__(self, config: LayerConfig, *, causal: bool = False):
        super().__init__(config.quant)
        self.config, self.causal = config, causal
        self.declare(
            lambda mode: programs.encoder_layer(
                config, PackedSequences(rows=1, count=1), mode, causal=causal
            )
        )

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x float32 [T, B, H], key_padding_mask bool [B, T], True is padding -> float32 [T, B, H],
        zero in padding.

        Raises:
            ValueError: another shape, no sentence, or no word.
        """
        rows, packing = pack_time_major(
            x, key_padding_mask, self.config.hidden, **packing_options(self)
        )
        return unpack_time_major(self.rows(rows, packing), packing)

    @beside_the_graph
    def rows(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Run on packed tokens: x float32 [M, H] -> [M, H]."""
        program = programs.encoder_layer(
            self.config, packing.sentences, self.mode(x), causal=self.causal
        )
        positions = position_inputs(
            self.config, packing.positions, packing.shape[1], causal=self.causal
        )
        (y,) = self.execute(program, {"x": x, "cu_seqlens": packing.cu_seqlens, **positions})
        return y

    @beside_the_graph
    @torch.no_grad()
    def step(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """One step of decoding by a causal layer: the next word of each sentence, x float32 [B, H]
        -> [B, H].

        The layer keeps what the next step needs in `state`, an empty dict at first (see
        `lsq.layers.decoding`).

        Raises:
            ValueError: the layer is not causal, in training mode, or its clips were never measured.
        """
        if not self.causal:
            raise ValueError(
                "a layer whose words see those after them cannot decode; make it with causal=True"
            )
        decoding.check_ready(self)
        past, inputs = decoding.step_inputs(state, x, self.config, self.target)
        y, history = self.execute(
            decoding.encoder_step(self.config, past, len(x), self.mode()), inputs
        )
        decoding.keep_history(state, history)
        return y
