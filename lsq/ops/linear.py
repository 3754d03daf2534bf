"""Products with a weight: x [M, K] times weight [N, K] transposed, without bias (the next operation adds it).

linear        float in, float out (mode="float")
linear_int8   codes in, codes out: rint(clamp(float(sum) * alpha)), alpha[n] = x_scale * weight_scale[n] / y_scale
linear_int32  codes in, int32 sums and their scale [N] out

The gradient of a product arrives in one of two forms, see `Builder.product_gradient`: float32 [M, N], or, under
backward="int8", codes [M, N] with a scale per row of gradient * weight_scale. Folding the weight's scale into the
gradient makes both backward products exact in the weight's codes; the row scale is folded into the other operand of
the weight gradient, which is rounded again per column. So one int8 gradient serves both products.
"""

import torch

from lsq import gemm, quant
from lsq.csrc import loader
from lsq.ops import rounding
from lsq.ops.registry import OpDefinition, register

BLOCK_ROWS = 512
"""Rows of int32 sums that are held at a time, so that they stay in cache between the product and its rounding."""


def float_reference(x, weight):
    """x float32 [M, K], weight float32 [N, K] -> y float32 [M, N]."""
    return (x @ weight.t(),)


def float_cpu(x, weight, y):
    torch.mm(x, weight.t(), out=y)


def float_differentiate(builder, operation):
    emit_float_gradients(builder, *operation.inputs, builder.gradient(operation.outputs[0]))


def emit_float_gradients(builder, x, weight, gradient):
    """Append the gradients of x [M, K] and weight [N, K] for `gradient` float32 [M, N]."""
    dx = builder.temporary("d_" + x.name, x.shape)
    builder.emit("linear_input_gradient_float", (gradient, weight), (dx,))
    builder.emit(
        "linear_weight_gradient_float", (gradient, builder.saved(x)), (builder.gradient_output(weight),)
    )
    builder.accumulate(x, dx)


register(OpDefinition(name="linear", reference=float_reference, cpu=float_cpu, differentiate=float_differentiate))
register(
    OpDefinition(
        name="linear_input_gradient_float",
        reference=lambda gradient, weight: (gradient @ weight,),
        cpu=lambda gradient, weight, dx: torch.mm(gradient, weight, out=dx),
    )
)
register(
    OpDefinition(
        name="linear_weight_gradient_float",
        reference=lambda gradient, x: (gradient.t() @ x,),
        cpu=lambda gradient, x, dweight: torch.mm(gradient.t(), x, out=dweight),
    )
)


def _alpha(x_scale, weight_scale, clip, bits):
    return (x_scale * weight_scale) / quant.scale_of(clip, bits)


def int8_reference(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    """x int8 [M, K], weight int8 [N, K], clip [1] -> codes int8 [M, N], scale [1], clipped, error or None."""
    sums = gemm.reference(x, weight).to(torch.float32)
    return rounding.round_scaled(sums * _alpha(x_scale, weight_scale, clip, bits), clip, bits=bits, error=error)


def int8_scratch(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    return [gemm.block_scratch(x.shape[0], weight.shape[0], BLOCK_ROWS)]


def int8_cpu(x, x_scale, weight, weight_scale, clip, codes, scale, clipped, error_out, block, *, bits, error=False):
    alpha = _alpha(x_scale, weight_scale, clip, bits)
    scale.copy_(quant.scale_of(clip, bits))
    columns = weight.shape[0]
    for first, sums in gemm.row_blocks(x, weight, block):
        rows = sums.shape[0]
        loader.call(
            "lsq_round_sums", sums, alpha, codes, scale, clipped, error_out, first, rows, columns,
            quant.maximum_code(bits),
        )


def int8_unquantized(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    return gemm.int8_product(x, weight).to(torch.float32) * (x_scale * weight_scale)


def int32_reference(x, x_scale, weight, weight_scale):
    """x int8 [M, K], weight int8 [N, K] -> sums int32 [M, N], scale float32 [N]."""
    return gemm.reference(x, weight), x_scale * weight_scale


def int32_cpu(x, x_scale, weight, weight_scale, sums, scale):
    gemm.int8_product(x, weight, out=sums)
    torch.mul(x_scale, weight_scale, out=scale)


def differentiate(builder, operation):
    """Both integer products."""
    gradient, row_scale = builder.product_gradient(operation.outputs[0])
    emit_gradients(builder, operation.inputs[:4], gradient, row_scale)


def emit_gradients(builder, operands, gradient, row_scale):
    """Append the gradients of the input (before its rounding), its clip, the weight and the weight's clip.

    operands: codes and scale of the input, codes and scale of the weight. gradient: float32 [M, N], or codes with
    a row scale.
    """
    codes, scale, weight_codes, weight_scale = operands
    x, weight = builder.rounded(codes), builder.rounded_weight(weight_codes)
    attributes = {"bits": builder.quant.bits}
    if row_scale is None:
        attributes["dtype"] = builder.quant.backward_dtype
    dx = builder.temporary("d_" + x.source.name, codes.shape)
    builder.emit(
        "linear_input_gradient",
        (gradient, row_scale, weight_codes, weight_scale, builder.saved(codes), builder.saved(x.clipped),
         builder.saved(x.error)),
        (dx, builder.gradient_output(x.clip)),
        **attributes,
    )
    if row_scale is not None:
        attributes["stream"] = builder.next_stream()
    builder.emit(
        "linear_weight_gradient",
        (gradient, row_scale, builder.saved(codes), builder.saved(scale), weight_scale, weight.parameter, weight.clip,
         builder.key if row_scale is not None else None),
        (builder.gradient_output(weight.parameter), builder.gradient_output(weight.clip)),
        clip_gradient=builder.quant.clip_gradient,
        **attributes,
    )
    builder.accumulate(codes, dx)


register(
    OpDefinition(
        name="linear_int8", reference=int8_reference, cpu=int8_cpu, differentiate=differentiate,
        unquantized=int8_unquantized, scratch=int8_scratch,
    )
)
register(
    OpDefinition(name="linear_int32", reference=int32_reference, cpu=int32_cpu, differentiate=differentiate)
)
