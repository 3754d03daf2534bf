"""Linear layers of Transformers, forward and backward: PyTorch, torchao, SDNQ, lsq.

"layers" are all linear layers of one block, with gradients of inputs and parameters. Sides with
bfloat16 in their name have it in parameters, inputs and gradients; "autocast" has it in products. A
side that cannot run is left out.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial

import common
import torch
from model_sides import sdnq, torchao

import lsq
from lsq.config import QuantConfig

MODELS = {
    "Transformer base": ((512, 512), (512, 1536), (512, 2048), (2048, 512), (512, 32000)),
    "GPT-2 small": ((768, 2304), (768, 768), (768, 3072), (3072, 768)),
    "Llama 110M": (*4 * ((768, 768),), *2 * ((768, 2048),), (2048, 768)),
}
"""Inputs and outputs of the layers of each."""
QUICK = {"tiny": ((64, 128),)}


class Conv1D(torch.nn.Module):
    """A linear layer with a weight [nx, nf], as GPT-2's in transformers."""

    def __init__(self, nx: int, nf: int):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = torch.nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = torch.nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


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


def rows(name: str, timings: dict, operations: float) -> Iterator[dict]:
    """Rows of the table; `operations`: multiplications and additions of what was timed."""
    for side, timing in timings.items():
        yield {
            "shape": name,
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
    for name, shapes in (QUICK if options.quick else MODELS).items():
        timings = common.alternate(layer_sides(shapes, options.rows), rounds=options.rounds)
        weights = sum(inputs * outputs for inputs, outputs in shapes)
        table += rows(name, timings, 3 * 2 * options.rows * weights)
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
