"""read_product: the float values of a product, with its bias; append_time: keys or values of one more step."""

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import THREADS, VECTOR, patches, row_defines
from lsq.csrc.launch import launch
from lsq.ops import kernels, product_gradient, rounding
from lsq.ops.registry import OpDefinition, register


def reference(y, y_scale, bias, *, bits):
    """y product [M, N], bias [N] or None -> float32 [M, N]."""
    values = rounding.read_product(y, y_scale)
    return (values + bias if bias is not None else values,)


def cpu(y, y_scale, bias, out, *, bits):
    rows, columns = y.shape
    source = product_gradient.arguments(y, y_scale, None, None, bits)[:3]
    loader.call("lsq_read_product", *source, bias, out, rows, columns)


def cuda(y, y_scale, bias, out, *, bits):
    rows, columns = y.shape
    unit = VECTOR if columns % VECTOR == 0 else 1
    return [
        launch(
            "elementwise.cu", "lsq_read_product", y, y_scale, bias, out, rows, columns, grid=patches(rows, columns),
            UNIT=unit, **kernels.activation_define(y, out), **kernels.product_define(y),
        )
    ]


def backward_reference(gradient, y, clipped, y_error, weight_scale, key, *, bits, bias, gradient_stream=None):
    """gradient float32 [M, N] -> (dy or its codes [M, N], row scale [M], dclip of y [1], dbias [N] or None)."""
    dy, row_scale, dclip = product_gradient.finish(
        gradient, y, clipped, y_error, weight_scale, key, bits=bits, stream=gradient_stream
    )
    return dy, row_scale, dclip, gradient.sum(dim=0) if bias else None


def backward_cpu(
    gradient, y, clipped, y_error, weight_scale, key, dy, row_scale, dclip, dbias,
    *, bits, bias, gradient_stream=None,
):
    rows, columns = gradient.shape
    source = (None, 2, None, None, None, 1.0)
    if y is not None:
        source = product_gradient.arguments(y, None, clipped, y_error, bits)
    loader.call(
        "lsq_read_product_backward", gradient, *source, weight_scale, key, gradient_stream or 0,
        dy, row_scale, dclip, dbias, rows, columns,
    )


def backward_cuda(
    gradient, y, clipped, y_error, weight_scale, key, dy, row_scale, dclip, dbias, partial,
    *, bits, bias, gradient_stream=None,
):
    rows, columns = gradient.shape
    return [
        launch(
            "read.cu", "lsq_read_product_backward", gradient, y if clipped is not None else None, clipped, y_error,
            weight_scale, key, dy, row_scale, partial, rows, gradient_stream or 0, grid=len(partial),
            ROUNDED=int(row_scale is not None), **kernels.activation_define(gradient, dy), **row_defines(columns),
        ),
        kernels.finish_sums(partial, columns, (dbias,), dclip, kernels.clip_factor(y_error, bits)),
    ]


def backward_cuda_scratch(gradient, *_, **attributes):
    return [kernels.partial_scratch(*gradient.shape, 1)]


def differentiate(builder, operation):
    y, _, bias = operation.inputs
    product = builder.product(y)
    dy, row_scale, attributes = builder.product_gradient_outputs(product)
    builder.emit(
        "read_product_backward",
        (
            builder.gradient(operation.outputs[0]), y if product.clipped is not None else None, product.clipped,
            product.error, product.weight_scale if row_scale else None, builder.key if row_scale else None,
        ),
        (dy, row_scale, builder.gradient_output(product.clip), builder.gradient_output(bias)),
        bias=bias is not None, **operation.attributes, **attributes,
    )


def append_reference(before, now):
    """[B, N, P, D] and [B, N, 1, D] -> [B, N, P + 1, D]."""
    return (torch.cat([before, now], dim=2),)


def append_cpu(before, now, out):
    torch.cat([before, now], dim=2, out=out)


def append_cuda(before, now, out):
    batch, heads, past, width = before.shape
    rows, unit = batch * heads, VECTOR if width % VECTOR == 0 else 1
    return [
        launch(
            "elementwise.cu", "lsq_append", before, now, out, rows, past * width, now.shape[2] * width,
            grid=max(1, -(-out.numel() // (unit * THREADS))), UNIT=unit, **kernels.activation_define(before, now, out),
        )
    ]


register(
    OpDefinition(name="read_product", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate)
)
register(
    OpDefinition(
        name="read_product_backward", reference=backward_reference, cpu=backward_cpu, cuda=backward_cuda,
        cuda_scratch=backward_cuda_scratch,
    )
)
register(OpDefinition(name="append_time", reference=append_reference, cpu=append_cpu, cuda=append_cuda))
