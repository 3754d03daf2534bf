"""Linear layers of others' models, forward and backward: PyTorch, torchao and SDNQ in int8,
lsq.convert.

The linear layers of one block of GPT-2 small and of a Llama with 110 million weights, each on rows
of its own, with the gradients of its input and of all its parameters. Sides with bfloat16 in their
name have it in parameters, inputs and gradients. Sides of packages that are not installed are left
out, and said on standard error.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial

import common
import torch

import lsq
from lsq.config import QuantConfig

SHAPES = {
    "GPT-2 small": ((768, 2304), (768, 768), (768, 3072), (3072, 768)),
    "Llama 110M": (
        (768, 768),
        (768, 768),
        (768, 768),
        (768, 768),
        (768, 2048),
        (768, 2048),
        (2048, 768),
    ),
}
"""Inputs and outputs of each layer."""
QUICK_SHAPES = {"tiny": ((64, 128), (128, 64))}


class Conv1D(torch.nn.Module):
    """As GPT-2's in transformers: a weight [nx, nf]."""

    def __init__(self, nx: int, nf: int):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = torch.nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = torch.nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def convert(layers: torch.nn.Module) -> None:
    """lsq's side; clips are measured in the first passes."""
    lsq.convert(layers, QuantConfig())


def torchao(layers: torch.nn.Module) -> None:
    """torchao's int8 mixed-precision training."""
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(layers, Int8MixedPrecisionTrainingConfig(module_swap=True))


def sdnq(layers: torch.nn.Module) -> None:
    """SDNQ's int8 products on weights that stay floats, its nearest to the others."""
    from sdnq.training import sdnq_training_post_load_quant

    sdnq_training_post_load_quant(
        layers,
        weights_dtype="int8",
        quantized_matmul_dtype="int8",
        use_quantized_matmul=True,
        group_size=-1,
        use_static_quantization=False,
        use_grad_ckpt=False,
        quantization_device="cpu",
        return_device="cpu",
    )


def sides(shapes, rows: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    linears = torch.nn.ModuleList(torch.nn.Linear(*shape) for shape in shapes)
    conv1d = torch.nn.ModuleList(Conv1D(*shape) for shape in shapes)
    wanted = {
        "float32": (linears, torch.float32, None),
        "bfloat16": (linears, torch.bfloat16, None),
        "torchao int8": (linears, torch.float32, torchao),
        "torchao int8 bfloat16": (linears, torch.bfloat16, torchao),
        "SDNQ int8": (linears, torch.float32, sdnq),
        "SDNQ int8 bfloat16": (linears, torch.bfloat16, sdnq),
        "lsq": (linears, torch.float32, convert),
        "lsq bfloat16": (linears, torch.bfloat16, convert),
        "lsq Conv1D": (conv1d, torch.float32, convert),
        "lsq Conv1D bfloat16": (conv1d, torch.bfloat16, convert),
    }
    found = {}
    for name, (layers, dtype, change) in wanted.items():
        layers = copy.deepcopy(layers).to(dtype)
        try:
            if change is not None:
                change(layers)
            run = partial(step, layers, [batch(shape, rows, dtype) for shape in shapes])
            common.settle(run)
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            found[name] = run
    return found


def batch(
    shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient of the output of a layer."""
    inputs, outputs = shape
    return torch.randn(rows, inputs, dtype=dtype, requires_grad=True), torch.randn(
        rows, outputs, dtype=dtype
    )


def step(layers: torch.nn.ModuleList, batches) -> None:
    """Forward and backward of every layer."""
    for layer, (x, gradient) in zip(layers, batches, strict=True):
        layer(x).backward(gradient)
        x.grad = None
        layer.zero_grad()


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=common.positive, default=2048, help="tokens")
    options = common.parse(parser, arguments)
    table = []
    for model, shapes in (QUICK_SHAPES if options.quick else SHAPES).items():
        timings = common.alternate(
            sides(shapes, 32 if options.quick else options.rows), rounds=options.rounds
        )
        table += [
            {
                "model": model,
                "side": side,
                "milliseconds": 1e3 * timing.median,
                "fastest": 1e3 * timing.fastest,
                "ratio": timings["bfloat16"].median / timing.median,
                "ratio_of_fastest": timings["bfloat16"].fastest / timing.fastest,
            }
            for side, timing in timings.items()
        ]
    common.report(
        "convert",
        table,
        common.conditions(
            options,
            baseline="bfloat16, eager",
            rows_of_each=options.rows,
            packages=("torchao", "sdnq", "openvino"),
        ),
        options,
    )


if __name__ == "__main__":
    main()
