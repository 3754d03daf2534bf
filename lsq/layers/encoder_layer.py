"""TransformerEncoderLayer: self-attention and feed-forward in one program."""

import torch

from lsq.config import LayerConfig
from lsq.layers import programs
from lsq.layers.blocks import Sentences
from lsq.layers.module import ProgramModule, beside_the_graph
from lsq.layers.packing import Packing, pack_time_major, unpack_time_major


class TransformerEncoderLayer(ProgramModule):
    """One encoder layer, pre- or post-norm, with dropout wherever fairseq has it.

    Args:
        config: shape and behaviour.
        causal: words see those before them alone, as in a language model.
    """

    def __init__(self, config: LayerConfig, *, causal: bool = False):
        super().__init__(config.quant)
        self.config, self.causal = config, causal
        self.declare(lambda mode: programs.encoder_layer(config, Sentences.of(1, 1, 1), mode))

    def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x float32 [T, B, H], key_padding_mask bool [B, T], True is padding -> float32 [T, B, H], zero in padding.

        Raises:
            ValueError: another shape, no sentence, or no word.
        """
        rows, packing = pack_time_major(x, key_padding_mask, self.config.hidden)
        return unpack_time_major(self.rows(rows, packing), packing)

    @beside_the_graph
    def rows(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        """The same on packed rows: x float32 [M, H] -> [M, H]."""
        program = programs.encoder_layer(self.config, packing.sentences, self.mode(x), causal=self.causal)
        (y,) = self.execute(program, {"x": x, "starts": packing.starts})
        return y
