"""QuantizedLinear: a projection by itself."""

import torch

from lsq.config import QuantConfig, check_dimension
from lsq.layers import programs
from lsq.layers.module import ProgramModule, rows_of
from lsq.layers.torch_compile import beside_the_graph


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
        if not bias:
            self.register_parameter("bias", None)
        self.declare(lambda mode: programs.linear(quant, 1, inputs, outputs, mode, bias=bias))

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = rows_of(x, self.inputs)
        program = programs.linear(
            self.quant, rows.shape[0], self.inputs, self.outputs, self.mode(x), bias=self.bias is not None
        )
        (y,) = self.execute(program, {"x": rows})
        return y.view(*x.shape[:-1], self.outputs)
