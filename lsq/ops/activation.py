"""bias_activation_dropout: read a product, add the bias, ReLU or GELU, dropout, and round to codes again.

    a = dropout(activation(y + bias));   M rows, F columns
The backward pass computes the codes again from the product's codes, so that only those are saved.
GELU is the exact one, x * Phi(x) (Hendrycks & Gimpel 2016).
"""

import math

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import MANY_BLOCKS, row_blocks, row_defines
from lsq.csrc.launch import TICKET, launch
from lsq.ops import kernels, product_gradient, rounding
from lsq.ops.random import dropout as drop
from lsq.ops.random import dropout_threshold, keep_factor
from lsq.ops.registry import OpDefinition, register

KINDS = {"relu": 0, "gelu": 1}


def unquantized(y, y_scale, bias, clip, key, *, activation, dropout, stream, bits, error=False):
    """-> a float32 [M, F]."""
    x = rounding.read_product(y, y_scale) + bias
    x = x.clamp_min(0.0) if activation == "relu" else torch.nn.functional.gelu(x)
    return drop(x, dropout, key, stream)


def reference(y, y_scale, bias, clip, key, *, bits, error=False, **attributes):
    """y product [M, F], bias [F], clip [1] or None -> codes (or float32) [M, F], scale [1], clipped, error."""
    values = unquantized(y, y_scale, bias, clip, key, bits=bits, **attributes)
    return product_gradient.round_or_keep(values, clip, bits=bits, error=error)


def cpu(
    y, y_scale, bias, clip, key, out, scale, clipped, error_out, *, activation, dropout, stream, bits, error=False
):
    rows, columns = y.shape
    loader.call(
        "lsq_bias_activation", *product_gradient.arguments(y, y_scale, None, None, bits)[:3], bias, clip, key,
        stream, dropout_threshold(dropout), keep_factor(dropout), KINDS[activation],
        product_gradient.largest_code(clip, bits), out, scale, clipped, error_out, rows, columns,
    )


def cuda(
    y, y_scale, bias, clip, key, out, scale, clipped, error_out, *, activation, dropout, stream, bits, error=False
):
    rows, columns = y.shape
    values, codes = kernels.destinations(out, clip)
    return [
        launch(
            "activation.cu", "lsq_bias_activation", y, y_scale, bias, clip, key, values, codes, scale, clipped,
            error_out, TICKET, rows, *kernels.dropout_arguments(dropout, stream),
            float(product_gradient.largest_code(clip, bits)), grid=row_blocks(rows, columns, most=MANY_BLOCKS),
            ACTIVATION=KINDS[activation], **kernels.activation_define(y, values), **kernels.product_define(y),
            **row_defines(columns),
        )
    ]


def backward_reference(
    gradient, y, y_scale, clipped, y_error, bias, weight_scale, key,
    *, activation, dropout, stream, bits, gradient_stream=None,
):
    """gradient float32 [M, F] of a -> (dy or its codes [M, F], row scale [M], dclip of y [1], dbias [F])."""
    x = rounding.read_product(y, y_scale) + bias
    gradient = drop(gradient, dropout, key, stream)
    if activation == "relu":
        gradient = torch.where(x > 0, gradient, 0.0)
    else:
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        gradient = gradient * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)
    dbias = gradient.sum(dim=0)
    dy, row_scale, dclip = product_gradient.finish(
        gradient, y, clipped, y_error, weight_scale, key, bits=bits, stream=gradient_stream
    )
    return dy, row_scale, dclip, dbias


def backward_cpu(
    gradient, y, y_scale, clipped, y_error, bias, weight_scale, key, dy, row_scale, dclip, dbias,
    *, activation, dropout, stream, bits, gradient_stream=None,
):
    rows, columns = y.shape
    loader.call(
        "lsq_bias_activation_backward", gradient, *product_gradient.arguments(y, y_scale, clipped, y_error, bits),
        bias, key, stream, dropout_threshold(dropout), keep_factor(dropout), KINDS[activation],
        weight_scale, gradient_stream or 0, dy, row_scale, dclip, dbias, rows, columns,
    )


def backward_cuda(
    gradient, y, y_scale, clipped, y_error, bias, weight_scale, key, dy, row_scale, dclip, dbias, partial,
    *, activation, dropout, stream, bits, gradient_stream=None,
):
    rows, columns = y.shape
    drop_stream, threshold, keep = kernels.dropout_arguments(dropout, stream)
    return [
        launch(
            "activation.cu", "lsq_bias_activation_backward", gradient, y, y_scale, clipped, y_error, bias,
            weight_scale, key, dy, row_scale, partial, rows, drop_stream, threshold, gradient_stream or 0, keep,
            grid=len(partial), ACTIVATION=KINDS[activation], ROUNDED=int(row_scale is not None),
            **kernels.activation_define(gradient, y, dy), **kernels.product_define(y), **row_defines(columns),
        ),
        kernels.finish_sums(partial, columns, (dbias,), dclip, kernels.clip_factor(y_error, bits)),
    ]


def backward_cuda_scratch(gradient, *_, **attributes):
    return [kernels.partial_scratch(*gradient.shape, 1)]


def differentiate(builder, operation):
    y, y_scale, bias, _, key = operation.inputs
    product = builder.product(y)
    gradient = builder.gradient(operation.outputs[0])
    dy, row_scale, attributes = builder.product_gradient_outputs(product)
    builder.emit(
        "bias_activation_dropout_backward",
        (gradient, y, y_scale, product.clipped, product.error, bias, product.weight_scale if row_scale else None, key),
        (dy, row_scale, builder.gradient_output(product.clip), builder.gradient_output(bias)),
        activation=operation.attributes["activation"],
        dropout=operation.attributes["dropout"],
        stream=operation.attributes["stream"],
        bits=builder.quant.bits,
        **attributes,
    )


register(
    OpDefinition(
        name="bias_activation_dropout", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate,
        unquantized=unquantized, recompute=True,
    )
)
register(
    OpDefinition(
        name="bias_activation_dropout_backward", reference=backward_reference, cpu=backward_cpu, cuda=backward_cuda,
        cuda_scratch=backward_cuda_scratch,
    )
)
