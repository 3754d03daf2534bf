"""Linear layers of Transformers and their int8 products: PyTorch, torchao, SDNQ, lsq.

Products of Transformer base, for x [M, K], weight [N, K] and the gradient of the output [M, N]:
    output           x weight^T           [M, N]
    input_gradient   gradient weight      [M, K]
    weight_gradient  gradient^T x         [N, K]
The right-hand operand of an int8 product is timed in both layouts: "rows" is contiguous along the
inner dimension, "columns" across it. "layers" are all linear layers of one block, forward and
backward, with gradients of inputs and parameters. Sides with bfloat16 in their name have it in
parameters, inputs and gradients; "autocast" has it in products. A side that cannot run is left out.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial

import common
import torch
from model_sides import sdnq, torchao
from torch.nn import functional

import lsq
from lsq.config import QuantConfig

BASE = {
    "attention output": (512, 512),
    "query key value": (512, 1536),
    "feed-forward 1": (512, 2048),
    "feed-forward 2": (2048, 512),
    "vocabulary": (512, 32000),
}
"""Inputs and outputs of each layer of Transformer base."""
MODELS = {
    "Transformer base": tuple(BASE.values()),
    "GPT-2 small": ((768, 2304), (768, 768), (768, 3072), (3072, 768)),
    "Llama 110M": (*4 * ((768, 768),), *2 * ((768, 2048),), (2048, 768)),
}
QUICK = {"tiny": (64, 128)}


class Conv1D(torch.nn.Module):
    """A linear layer with a weight [nx, nf], as GPT-2's in transformers."""

    def __init__(self, nx: int, nf: int):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = torch.nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = torch.nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def product_sides(left: torch.Tensor, right: torch.Tensor) -> dict[str, Callable]:
    """The ways to multiply left float32 [M, K] by right float32 [N, K] transposed."""
    half_left, half_right = left.bfloat16(), right.bfloat16()
    codes_left, codes_right = (
        (tensor * 32).clamp(-127, 127).to(torch.int8) for tensor in (left, right)
    )
    columns = codes_right.t().contiguous()
    return {
        "float32": lambda: functional.linear(left, right),
        "bfloat16": lambda: functional.linear(half_left, half_right),
        "int8 rows": lambda: torch._int_mm(codes_left, codes_right.t()),
        "int8 columns": lambda: torch._int_mm(codes_left, columns),
    }


def product_rows(name: str, rows: int, shape: tuple[int, int], rounds: int) -> Iterator[dict]:
    inputs, outputs = shape
    x, weight, gradient = map(torch.randn, ((rows, inputs), (outputs, inputs), (rows, outputs)))
    operands = {
        "output": (x, weight),
        "input_gradient": (gradient, weight.t().contiguous()),
        "weight_gradient": (gradient.t().contiguous(), x.t().contiguous()),
    }
    for product, pair in operands.items():
        timings = common.alternate(product_sides(*pair), rounds=rounds)
        yield from side_rows(name, product, timings, 2 * rows * inputs * outputs)


def layer_sides(shapes: tuple[tuple[int, int], ...], rows: int) -> dict[str, Callable[[], None]]:
    """Forward and backward passes of layers of these inputs and outputs, by side."""
    linears = torch.nn.ModuleList(torch.nn.Linear(*shape) for shape in shapes)
    conv1d = torch.nn.ModuleList(Conv1D(*shape) for shape in shapes)
    floats = QuantConfig(backward="float")
    wanted = {
        "float32": (linears, None),
        "autocast": (linears, None),
        "bfloat16": (linears, None),
        "torchao int8": (linears, torchao),
        "torchao int8 bfloat16": (linears, torchao),
        "SDNQ int8": (linears, sdnq),
        "SDNQ int8 bfloat16": (linears, sdnq),
        "lsq": (linears, lsq.convert),
        "lsq, backward float32": (linears, partial(lsq.convert, quant=floats)),
        "lsq bfloat16": (linears, lsq.convert),
        "lsq Conv1D": (conv1d, lsq.convert),
        "lsq Conv1D bfloat16": (conv1d, lsq.convert),
    }
    found = {}
    for name, (layers, change) in wanted.items():
        dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
        layers = copy.deepcopy(layers).to(dtype)
        inputs = [torch.randn(rows, shape[0], dtype=dtype, requires_grad=True) for shape in shapes]
        gradients = [torch.randn(rows, shape[1], dtype=dtype) for shape in shapes]
        try:
            if change is not None:
                change(layers)
            found[name] = partial(step, layers, inputs, gradients, name == "autocast")
            common.settle(found[name])
        except Exception as error:  # whatever another package raises
            found.pop(name, None)
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def step(
    layers: torch.nn.ModuleList,
    inputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    autocast: bool,
) -> None:
    """Forward and backward pass of every layer."""
    for layer, x, gradient in zip(layers, inputs, gradients, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.backward(gradient.to(y.dtype))
        x.grad = None
        layer.zero_grad()


def side_rows(name: str, product: str, timings: dict, operations: float) -> Iterator[dict]:
    """Rows of the table; `operations`: multiplications and additions of what was timed."""
    for side, timing in timings.items():
        yield {
            "shape": name,
            "product": product,
            "side": side,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "giga_operations_per_second": 1e-9 * operations / timing.median,
            "ratio": timings["bfloat16"].median / timing.median,
            "ratio_of_fastest": timings["bfloat16"].fastest / timing.fastest,
            "ratio_to_float32": timings["float32"].median / timing.median,
        }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=common.positive, default=2048, metavar="N", help="tokens")
    options = common.parse(parser, arguments)
    if options.quick:
        options.rows = 32
    table = []
    for name, shape in (QUICK if options.quick else BASE).items():
        table += product_rows(name, options.rows, shape, options.rounds)
    models = {"tiny": tuple(QUICK.values())} if options.quick else MODELS
    for name, shapes in models.items():
        timings = common.alternate(layer_sides(shapes, options.rows), rounds=options.rounds)
        weights = sum(inputs * outputs for inputs, outputs in shapes)
        table += side_rows(name, "layers", timings, 3 * 2 * options.rows * weights)
    conditions = common.conditions(
        options,
        baseline="PyTorch in bfloat16",
        rows_of_each=options.rows,
        dtypes=["float32", "bfloat16", "int8"],
        packages=("torchao", "sdnq", "openvino"),
    )
    common.report("linear", table, conditions, options)


if __name__ == "__main__":
    main()
