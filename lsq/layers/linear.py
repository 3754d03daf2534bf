"""Projections by themselves, which take the place of float ones: QuantizedLinear, and that of
transformers' Conv1D."""

import functools

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from lsq.config import QuantConfig, check_dimension
from lsq.layers import programs
from lsq.layers.float_fallback import held
from lsq.layers.in_place import InPlace, class_in_place
from lsq.layers.module import rows_of
from lsq.layers.programs import Mode
from lsq.layers.torch_compile import beside_the_graph
from lsq.program.program import Program

ALONE = {"weight": ["weight"]}, {"input": ["input", "weight"]}
"""Names of the weights and activations of one product: see tensor_names."""
FLOATS = {torch.float32, torch.bfloat16}
"""Dtypes that a program reads and writes unconverted, where the backend takes either."""


@functools.lru_cache
def _check_sizes(inputs: int, outputs: int) -> None:
    check_dimension("inputs", inputs)
    check_dimension("outputs", outputs)


class Projection(InPlace):
    """y = x weight^T + bias with an int8 product; floats [..., inputs] in, [..., outputs] of the
    same dtype out.

    Under torch.autocast the result has the dtype of that. What needs no gradient costs none. Of no
    rows, it is that of the float layer.
    """

    in_out = False
    """Whether the weight is [inputs, outputs]."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs, of the weight that there is now."""
        shape = self.weight.shape
        return tuple(shape if self.in_out else shape[::-1])

    def take_place(self, quant: QuantConfig, path: str) -> None:
        self.begin(quant.at(path, *ALONE))
        self.declare(functools.partial(self._program, 1), measure=False)
        self.let_clips_learn(self.weight.requires_grad)

    def _program(self, rows: int, mode: Mode, dtypes=(torch.float32,) * 3) -> Program:
        sizes = self.sizes
        if self.quant.coded:
            _check_sizes(*sizes)
        rounded = self.quant.coded and self.quant.backward == "int8"
        if not (mode.backend.either_border and rounded and FLOATS.issuperset(dtypes)):
            dtypes = (torch.float32,) * 3
        return programs.linear(
            self.quant,
            rows,
            *sizes,
            mode,
            bias=self.bias is not None,
            in_out=self.in_out,
            dtypes=dtypes,
        )

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "parametrizations" in self._modules:  # a pass asks for parameters several times
            with parametrize.cached():
                return self._pass(x)
        return self._pass(x)

    def _pass(self, x: torch.Tensor) -> torch.Tensor:
        inputs, outputs = self.sizes
        if self.schedule.float_fallback:
            return held(self._in_floats(x), self.clips().values())
        if x.dim() and x.shape[-1] == inputs and x.numel() == 0:
            return self.reached(self._in_floats(x))
        rows, wanted = rows_of(x, inputs), result_dtype(x)
        program = self._program(
            rows.shape[0], self.mode_of({"x": x}), (x.dtype, self.weight.dtype, wanted)
        )
        (y,) = self.execute(program, {"x": rows})
        return y.view(*x.shape[:-1], outputs).to(wanted)

    def _in_floats(self, x: torch.Tensor) -> torch.Tensor:
        """Compute as the float layer does, in the dtype of the result."""
        dtype = result_dtype(x)
        weight = self.values_of("weight").t() if self.in_out else self.values_of("weight")
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), weight.to(dtype), bias)


class QuantizedLinear(Projection, nn.Linear):
    """A torch.nn.Linear with an int8 product: one for everybody else, with the same parameters
    beside its clips.

    Raises:
        ValueError: a width that int8 products cannot take.
    """

    float_class = nn.Linear

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = True, quant: QuantConfig | None = None
    ):
        super().__init__(quant or QuantConfig())
        if self.quant.coded:
            _check_sizes(inputs, outputs)
        self.in_features, self.out_features = inputs, outputs
        if not bias:
            self.register_parameter("bias", None)
        self.declare(lambda mode: programs.linear(self.quant, 1, inputs, outputs, mode, bias=bias))


class ByInputs(Projection):
    """A projection with a weight [nx, nf]: the Conv1D of transformers.

    Its class is `in_out_of(that class)`.
    """

    in_out = True


def in_out_of(float_class: type[nn.Module]) -> type[InPlace]:
    """The class of what takes the place of a `float_class`, and is one, too."""
    return class_in_place(ByInputs, float_class, f"Quantized{float_class.__name__}")


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a float product with x would have: its own, or that of torch.autocast."""
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else x.dtype
