"""The int8 products of one linear layer and the layer itself, against float32 and bfloat16.

Products, for x [M, K], weight [N, K] and the gradient of the output [M, N]:
    output           x weight^T           [M, N]
    input_gradient   gradient weight      [M, K]
    weight_gradient  gradient^T x         [N, K]
The right-hand operand of an int8 product is timed in both layouts: "rows" is contiguous along the
inner dimension, "columns" across it. Then the whole layer, forward and backward: "layer".
"""

from collections.abc import Callable
from functools import partial

import common
import torch
from torch.nn import functional

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear

SHAPES = {  # name: (M rows, K inputs, N outputs)
    "attention output": (2048, 512, 512),
    "query key value": (2048, 512, 1536),
    "feed-forward 1": (2048, 512, 2048),
    "feed-forward 2": (2048, 2048, 512),
    "vocabulary": (2048, 512, 32000),
}
QUICK_SHAPES = {"tiny": (32, 16, 48)}


def product_sides(left: torch.Tensor, right: torch.Tensor) -> dict[str, Callable]:
    """left float32 [M, K], right float32 [N, K] -> the ways to multiply left by right transposed.

    Both integer sides take a `left` that is contiguous along K, as a fused kernel writes it.
    """
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


def product_rows(shape: str, dimensions: tuple[int, int, int], rounds: int):
    """Time the three products of one layer; yields rows of the table."""
    rows, inputs, outputs = dimensions
    x, weight, gradient = (
        torch.randn(size) for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    operands = {
        "output": (x, weight),
        "input_gradient": (gradient, weight.t().contiguous()),
        "weight_gradient": (gradient.t().contiguous(), x.t().contiguous()),
    }
    for product, (left, right) in operands.items():
        timings = common.alternate(product_sides(left, right), rounds=rounds)
        yield from side_rows(shape, product, dimensions, timings)


def layer_sides(dimensions: tuple[int, int, int]) -> dict[str, Callable]:
    """Forward and backward of torch.nn.Linear and of QuantizedLinear, with gradients of
    everything."""
    rows, inputs, outputs = dimensions
    x = torch.randn(rows, inputs, requires_grad=True)
    gradient = torch.randn(rows, outputs)
    plain = torch.nn.Linear(inputs, outputs)

    def run(layer: torch.nn.Module) -> None:
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        torch.autograd.grad(layer(x), (x, *trained), gradient)

    def run_half() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = plain(x)
        torch.autograd.grad(y, (x, *plain.parameters()), gradient.bfloat16())

    quantized = {
        "int8, backward float": QuantConfig(backward="float"),
        "int8, backward int8": QuantConfig(backward="int8"),
    }
    sides = {"float32": partial(run, plain), "bfloat16": run_half}
    for name, quant in quantized.items():
        sides[name] = partial(run, QuantizedLinear(inputs, outputs, quant=quant))
        common.settle(sides[name])
    return sides


def side_rows(
    shape: str, product: str, dimensions: tuple[int, int, int], timings, products: int = 1
):
    """Rows of the table for the sides of one product, or of `products` products together."""
    rows, inputs, outputs = dimensions
    for side, timing in timings.items():
        yield {
            "shape": shape,
            "m": rows,
            "k": inputs,
            "n": outputs,
            "product": product,
            "side": side,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "giga_operations_per_second": products * 2e-9 * rows * inputs * outputs / timing.median,
            "ratio": timings["float32"].median / timing.median,
            "ratio_to_bfloat16": timings["bfloat16"].median / timing.median,
        }


def main(arguments: list[str] | None = None) -> None:
    options = common.parse(common.parser(__doc__), arguments)
    table = []
    for shape, dimensions in (QUICK_SHAPES if options.quick else SHAPES).items():
        table += product_rows(shape, dimensions, options.rounds)
        timings = common.alternate(layer_sides(dimensions), rounds=options.rounds)
        table += side_rows(shape, "layer", dimensions, timings, products=3)
    common.report(
        "linear",
        table,
        common.conditions(
            options,
            baseline="torch.nn.functional.linear in float32",
            dtypes=["float32", "bfloat16", "int8"],
        ),
        options,
    )


if __name__ == "__main__":
    main()
