"""FeedForward: two projections with an activation between them."""

import torch

from lsq.config import LayerConfig
from lsq.layers.module import ProgramModule, beside_the_graph, initialise_uniform, rows_of
from lsq.program import layers as programs


class FeedForward(ProgramModule):
    """fc2(dropout(activation(fc1(x)))) with int8 products; float32 [..., H] in and out."""

    def __init__(self, config: LayerConfig):
        super().__init__(config.quant)
        self.config = config
        hidden, inner = config.hidden, config.feed_forward
        for name, rows, columns in (("fc1", inner, hidden), ("fc2", hidden, inner)):
            initialise_uniform(self.add_weight(name + "_weight", rows, columns), columns)
            initialise_uniform(self.add_bias(name + "_bias", rows), columns)
        self.add_activation_clips("input", "hidden", "activation")
        self.calibrate_weights()

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = rows_of(x, self.config.hidden)
        program = programs.feed_forward(self.config, rows.shape[0], self.training, self.wants_backward(x))
        (y,) = self.execute(program, {"x": rows})
        return y.view(x.shape)
