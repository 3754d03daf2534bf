"""FeedForward: two projections with an activation between them, or three with a gate."""

import torch

from lsq.config import LayerConfig
from lsq.layers import programs
from lsq.layers.module import ProgramModule, rows_of
from lsq.layers.torch_compile import beside_the_graph


class FeedForward(ProgramModule):
    """fc2(dropout(activation(fc1(x)))) with int8 products; float32 [..., H] in and out.

    With config.gated it is fc2(dropout(activation(gate(x)) * up(x))): SwiGLU with "silu" (Shazeer
    2020).
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
