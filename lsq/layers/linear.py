"""Single linear layers, which take the place of float ones."""

from functools import lru_cache, partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from lsq.config import QuantConfig, check_dimension
from lsq.layers.builder import Epilogue, Mode, cached
from lsq.layers.coded_weight import CodedWeight
from lsq.layers.in_place import InPlace, class_in_place
from lsq.layers.module import beside_the_graph, held, rows_of
from lsq.program.program import Program
from lsq.program.tensor import fan_in
from lsq.run.shards import is_shard

ALONE = {"weight": ["weight"]}, {"input": ["input", "weight"]}
"""Tensor names of a layer that is one product; see model_formats.tensor_names."""
FLOATS = {torch.float32, torch.bfloat16}
"""Dtypes that a program reads and writes without conversion, if its backend takes both."""
FLOAT32 = (torch.float32,) * 3


@cached
def linear(
    quant: QuantConfig,
    rows: int,
    inputs: int,
    outputs: int,
    mode: Mode,
    *,
    bias: bool,
    in_out: bool = False,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = FLOAT32,
) -> Program:
    """Build x [M, K] -> y [M, N]; `dtypes`: of x, weight and y, all float32 without codes."""
    x_dtype, weight_dtype, y_dtype = dtypes if quant.coded else FLOAT32
    b = mode.builder("linear", quant)
    x = b.round(b.input("x", (rows, inputs), x_dtype), "input_clip")
    bound = fan_in(inputs)
    y = b.project(
        x,
        "weight",
        (outputs, inputs),
        Epilogue(name="y", dtype=y_dtype),
        bias="bias" if bias else None,
        bias_bound=bound,
        bound=bound,
        in_out=in_out,
        dtype=weight_dtype,
    )
    b.output(y.floats)
    return b.build()


@lru_cache
def _check_sizes(inputs: int, outputs: int) -> None:
    check_dimension("inputs", inputs)
    check_dimension("outputs", outputs)


class Projection(InPlace):
    """y = x weight^T + bias in int8: [..., inputs] -> [..., outputs] of x's or autocast's dtype."""

    in_out = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs, read from the weight."""
        shape = self.weight.shape
        return tuple(shape if self.in_out else shape[::-1])

    def take_place(self, quant: QuantConfig, path: str) -> None:
        self.begin(quant.at(path, *ALONE))
        self.declare(partial(self._program, 1), measure=False)
        self.let_clips_learn(self.weight.requires_grad)

    def _program(self, rows: int, mode: Mode, dtypes=FLOAT32) -> Program:
        sizes = self.sizes
        if self.quant.coded:
            _check_sizes(*sizes)
        rounded = self.quant.coded and self.quant.backward == "int8"
        if not (mode.backend.either_border and rounded and FLOATS.issuperset(dtypes)):
            dtypes = FLOAT32
        return linear(
            self.quant,
            rows,
            *sizes,
            mode,
            bias=self.bias is not None,
            in_out=self.in_out,
            dtypes=dtypes,
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if isinstance(self._parameters.get(name), CodedWeight) and is_shard(param):
            raise ValueError(
                f"parallelize_module would split the {name} of this {type(self).__name__}, which is"
                " kept as codes alone: leave this layer out of the plan, or call lsq.revert(model),"
                " convert it again, and split float weights"
            )
        super().register_parameter(name, param)

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor and is_shard(x):
            from lsq.layers.tensor_parallel import run_part  # late, since it takes a second

            return run_part(self, x)
        if "parametrizations" in self._modules:  # a pass reads parameters several times
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
        dtype = result_dtype(x)
        weight = self.values_of("weight").t() if self.in_out else self.values_of("weight")
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), weight.to(dtype), bias)


class QuantizedLinear(Projection, nn.Linear):
    """A torch.nn.Linear in int8; raises ValueError unless its widths are multiples of 16."""

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
        self.declare(lambda mode: linear(self.quant, 1, inputs, outputs, mode, bias=bias))


class ByInputs(Projection):
    """A projection with a weight [inputs, outputs]: the Conv1D of transformers."""

    in_out = True


def in_out_of(float_class: type[nn.Module]) -> type[InPlace]:
    """Return the class of a converted `float_class`, a subclass of it and of ByInputs."""
    return class_in_place(ByInputs, float_class, f"Quantized{float_class.__name__}")


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a float product with x has: x's own, or torch.autocast's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else x.dtype


def autocasts(device: str) -> bool:
    """Return whether torch.autocast is on for a type of device; it knows no meta device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
