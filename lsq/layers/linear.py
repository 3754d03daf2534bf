"""QuantizedLinear: a projection by itself."""

import torch

from lsq.config import QuantConfig, check_dimension
from lsq.layers.module import ProgramModule, beside_the_graph, initialise_uniform, rows_of
from lsq.program import layers as programs


class QuantizedLinear(ProgramModule):
    """y = x weight^T + bias with an int8 product; float32 [..., inputs] in, float32 [..., outputs] out.

    Raises:
        ValueError: a width that int8 products cannot take.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, quant: QuantConfig | None = None):
        quant = quant or QuantConfig()
        super().__init__(quant)
        if quant.quantized:
            check_dimension("inputs", inputs)
            check_dimension("outputs", outputs)
        self.inputs, self.outputs = inputs, outputs
        initialise_uniform(self.add_weight("weight", outputs, inputs), inputs)
        if bias:
            initialise_uniform(self.add_bias("bias", outputs), inputs)
        else:
            self.register_parameter("bias", None)
        self.add_activation_clips("input")
        self.calibrate_weights()

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = rows_of(x, self.inputs)
        program = programs.linear(
            self.quant, rows.shape[0], self.inputs, self.outputs, self.bias is not None, self.training,
            self.wants_backward(x),
        )
        (y,) = self.execute(program, {"x": rows})
        return y.view(*x.shape[:-1], self.outputs)
