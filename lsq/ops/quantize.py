"""quantize: one clip for a whole activation; quantize_weight: one clip per output channel.

The gradient of rounded codes is by convention the gradient *before* the rounding: whoever reads the codes applies
the straight-through mask, in the loop that it runs anyway, and adds to the gradient of the clip.
M rows, N columns, K inputs of a weight.
"""

import torch

from lsq import quant
from lsq.csrc import loader
from lsq.csrc.geometry import MANY_BLOCKS, THREADS, VECTOR, row_blocks, row_defines, warp_blocks
from lsq.csrc.launch import TICKET, float_define, launch
from lsq.ops import rounding
from lsq.ops.kernels import check_columns
from lsq.ops.registry import OpDefinition, register


def reference(x, clip, *, bits, error=False):
    """x float32 [M, N], clip [1] -> codes int8 [M, N], scale [1], clipped (packed bits), error [M, N] or None."""
    return rounding.round_activation(x, clip, bits=bits, error=error)


def cpu(x, clip, codes, scale, clipped, error_out, *, bits, error=False):
    loader.call("lsq_quantize", x, clip, codes, scale, clipped, error_out, x.numel(), quant.maximum_code(bits))


def cuda(x, clip, codes, scale, clipped, error_out, *, bits, error=False):
    rows, columns = x.shape
    return [
        launch(
            "quantize.cu", "lsq_quantize", x, clip, codes, scale, clipped, error_out, TICKET, rows,
            float(quant.maximum_code(bits)), grid=row_blocks(rows, columns, most=MANY_BLOCKS), **float_define(x),
            **row_defines(columns),
        )
    ]


def unquantized(x, clip, *, bits, error=False):
    return x


def differentiate(builder, operation):
    x, _ = operation.inputs
    builder.accumulate(x, builder.gradient(operation.outputs[0]))


QUANTIZE = register(
    OpDefinition(
        name="quantize", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate, unquantized=unquantized
    )
)


def weight_reference(weight, clip, *, bits, rows=None):
    """weight float32 [N, K], clip [N] or [1] -> codes int8 [rows, K], scale float32 [rows].

    Rows beyond N (the padding of a vocabulary) have codes 0 and scale 1.
    """
    codes, scale, _ = quant.quantize(weight, clip, bits)
    padding = (rows or weight.shape[0]) - weight.shape[0]
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
    return codes, torch.nn.functional.pad(scale.expand(weight.shape[0]), (0, padding), value=1.0).contiguous()


def weight_cpu(weight, clip, codes, scale, *, bits, rows=None):
    valid, columns = weight.shape
    loader.call(
        "lsq_quantize_weight", weight, clip, clip.numel(), codes, scale, valid, rows or valid, columns,
        quant.maximum_code(bits),
    )


def weight_cuda(weight, clip, codes, scale, *, bits, rows=None):
    valid, columns = weight.shape
    check_columns(16, **{"the width of a weight": columns})
    return [
        launch(
            "quantize_weight.cu", "lsq_quantize_weight", weight, clip, codes, scale, TICKET, clip.numel(), valid,
            rows or valid, columns, float(quant.maximum_code(bits)),
            grid=warp_blocks(rows or valid),
        )
    ]


def weight_differentiate(builder, operation):
    """Nothing to do: the weight-gradient product masks its own result, see linear.py."""


QUANTIZE_WEIGHT = register(
    OpDefinition(
        name="quantize_weight", reference=weight_reference, cpu=weight_cpu, cuda=weight_cuda,
        differentiate=weight_differentiate,
    )
)


def add_reference(a, b):
    """a + b, float32 of any shape: two gradients of one tensor."""
    return (a + b,)


def add_cpu(a, b, out):
    torch.add(a, b, out=out)


def add_cuda(a, b, out):
    return [
        launch(
            "elementwise.cu", "lsq_add", a, b, out, out.numel(), grid=max(1, -(-out.numel() // (VECTOR * THREADS))),
            **float_define(a, b, out),
        )
    ]


ADD = register(OpDefinition(name="add", reference=add_reference, cpu=add_cpu, cuda=add_cuda))
