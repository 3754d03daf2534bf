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
from lsq.csrc.geometry import patches
from lsq.csrc.launch import TICKET, Product, launch
from lsq.ops import rounding
from lsq.ops.kernels import check_columns, float_operand, zero
from lsq.ops.registry import OpDefinition, register


def float_reference(x, weight):
    """x float32 [M, K], weight float32 [N, K] -> y float32 [M, N]."""
    return (x @ weight.t(),)


def float_cpu(x, weight, y):
    torch.mm(x, weight.t(), out=y)


def float_cuda(x, weight, y, *narrow):
    return _float_products(x, weight, narrow, lambda weight: Product(a=x, b=weight, out=y), y)


def _float_products(x, weight, narrow, product, out):
    """The product of x [M, ...] with a weight that is first brought to x's dtype, or zeros for an empty batch."""
    if x.shape[0] == 0:
        return [zero(out)]
    if weight.dtype == x.dtype:
        return [product(weight)]
    check_columns(8, **{"the width of a weight to convert": weight.shape[1]})
    return [float_operand(weight, None, narrow[0]), product(narrow[0])]


def float_cuda_scratch(x, weight):
    """The weight in the dtype of the activations, where it has another."""
    return [] if weight.dtype == x.dtype else [(weight.shape, x.dtype)]


def input_gradient_cuda(gradient, weight, dx, *narrow):
    def product(weight):
        return Product(a=gradient, b=weight, out=dx, transpose_b=True)

    return _float_products(gradient, weight, narrow, product, dx)


def weight_gradient_cuda(gradient, x, dweight):
    if x.shape[0] == 0:
        return [zero(dweight)]
    return [Product(a=gradient, b=x, out=dweight, transpose_a=True, transpose_b=True)]


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


register(
    OpDefinition(
        name="linear", reference=float_reference, cpu=float_cpu, cuda=float_cuda, cuda_scratch=float_cuda_scratch,
        differentiate=float_differentiate,
    )
)
register(
    OpDefinition(
        name="linear_input_gradient_float",
        reference=lambda gradient, weight: (gradient @ weight,),
        cpu=lambda gradient, weight, dx: torch.mm(gradient, weight, out=dx),
        cuda=input_gradient_cuda,
        cuda_scratch=float_cuda_scratch,
    )
)
register(
    OpDefinition(
        name="linear_weight_gradient_float",
        reference=lambda gradient, x: (gradient.t() @ x,),
        cpu=lambda gradient, x, dweight: torch.mm(gradient.t(), x, out=dweight),
        cuda=weight_gradient_cuda,
    )
)


def _alpha(x_scale, weight_scale, clip, bits):
    return (x_scale * weight_scale) / quant.scale_of(clip, bits)


def int8_reference(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    """x int8 [M, K], weight int8 [N, K], clip [1] -> codes int8 [M, N], scale [1], clipped, error or None."""
    sums = gemm.reference(x, weight).to(torch.float32)
    return rounding.round_scaled(sums * _alpha(x_scale, weight_scale, clip, bits), clip, bits=bits, error=error)


def int8_scratch(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    return [gemm.scratch_for("linear_int8", x.shape[0], *weight.shape)]


def int8_cpu(x, x_scale, weight, weight_scale, clip, codes, scale, clipped, error_out, memory, *, bits, error=False):
    alpha = _alpha(x_scale, weight_scale, clip, bits)
    scale.copy_(quant.scale_of(clip, bits))
    columns = weight.shape[0]
    for first, sums in gemm.row_blocks("linear_int8", x, weight, memory):
        rows = sums.shape[0]
        loader.call(
            "lsq_round_sums", sums, alpha, codes, scale, clipped, error_out, first, rows, columns,
            quant.maximum_code(bits),
        )


def int8_cuda_scratch(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    return [((x.shape[0], weight.shape[0]), torch.int32)]


def int8_cuda(x, x_scale, weight, weight_scale, clip, codes, scale, clipped, error_out, sums, *, bits, error=False):
    rows, columns = sums.shape
    rounding_launch = launch(
        "linear.cu", "lsq_round_sums", sums, x_scale, weight_scale, clip, codes, scale, clipped, error_out, TICKET,
        rows, columns, float(quant.maximum_code(bits)), grid=patches(rows, columns),
    )
    return [*int8_products(x, weight, sums), rounding_launch]


def int8_products(a, b, sums):
    """[the product sums int32 [M, N] = a int8 [M, K] times b int8 [N, K] transposed], or nothing for an empty batch.

    Raises:
        ValueError: N or K is no multiple of 16.
    """
    check_columns(16, **{"the inner width of an int8 product": a.shape[1], "its outer width": b.shape[0]})
    return [Product(a=a, b=b, out=sums)] if sums.numel() else []


def int8_unquantized(x, x_scale, weight, weight_scale, clip, *, bits, error=False):
    return gemm.int8_product(x, weight).to(torch.float32) * (x_scale * weight_scale)


def int32_reference(x, x_scale, weight, weight_scale):
    """x int8 [M, K], weight int8 [N, K] -> sums int32 [M, N], scale float32 [N]."""
    return gemm.reference(x, weight), x_scale * weight_scale


def int32_scratch(x, x_scale, weight, weight_scale):
    return [gemm.scratch_for("linear_int32", x.shape[0], *weight.shape)]


def int32_cpu(x, x_scale, weight, weight_scale, sums, scale, memory):
    gemm.multiply_into("linear_int32", x, weight, sums, memory)
    torch.mul(x_scale, weight_scale, out=scale)


def int32_cuda(x, x_scale, weight, weight_scale, sums, scale):
    columns = weight.shape[0]
    scale_launch = launch(
        "linear.cu", "lsq_sum_scale", x_scale, weight_scale, scale, columns, grid=max(1, -(-columns // 256)),
    )
    return [*int8_products(x, weight, sums), scale_launch]


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
        name="linear_int8", reference=int8_reference, cpu=int8_cpu, cuda=int8_cuda, differentiate=differentiate,
        unquantized=int8_unquantized, scratch=int8_scratch, cuda_scratch=int8_cuda_scratch,
    )
)
register(
    OpDefinition(
        name="linear_int32", reference=int32_reference, cpu=int32_cpu, cuda=int32_cuda, differentiate=differentiate,
        scratch=int32_scratch,
    )
)
