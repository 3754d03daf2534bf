"""split_heads: from a fused product to queries, keys, values; merge_heads: from the context back to rows, rounded.

M = T * B rows, time-major; N heads of D columns, H = N * D. Products of several projections stand side by side.
"""

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import MANY_BLOCKS, row_blocks, row_defines
from lsq.csrc.launch import TICKET, check, launch
from lsq.ops import kernels, product_gradient, rounding
from lsq.ops.registry import OpDefinition, register


def split_reference(y, y_scale, bias, *, batch, heads, parts, factor, bits):
    """y product [T * B, P * H], bias [P * H] -> P tensors float32 [B, N, T, D]; the first is multiplied by `factor`."""
    values = rounding.read_product(y, y_scale) + bias
    blocks = values.view(-1, batch, parts, heads, values.shape[1] // (parts * heads))
    first, *rest = (blocks[:, :, part].permute(1, 2, 0, 3).contiguous() for part in range(parts))
    return first * factor, *rest


def split_cpu(y, y_scale, bias, *outputs, batch, heads, parts, factor, bits):
    rows, columns = y.shape
    padded = (*outputs, None, None)[:3]
    loader.call(
        "lsq_split_heads", *product_gradient.arguments(y, y_scale, None, None, bits)[:3], bias, *padded,
        float(factor), parts, rows, batch, heads, columns // (parts * heads),
    )


def _head_defines(rows, columns, batch, heads, parts):
    """-D for a kernel that moves heads, and T."""
    check(rows < 2**31, f"{rows} rows are too many for the heads of one launch on CUDA: split the batch")
    defines = {"PARTS": parts, "WIDTH": columns // (parts * heads), **row_defines(columns)}
    return defines, rows // batch if batch else 0


def split_cuda(y, y_scale, bias, *outputs, batch, heads, parts, factor, bits):
    rows, columns = y.shape
    defines, time = _head_defines(rows, columns, batch, heads, parts)
    return [
        launch(
            "heads.cu", "lsq_split_heads", y, y_scale, bias, *(*outputs, None, None)[:3], rows, batch, time,
            float(factor), grid=row_blocks(rows, columns, most=MANY_BLOCKS), **kernels.activation_define(y, *outputs),
            **kernels.product_define(y), **defines,
        )
    ]


def split_backward_reference(
    *inputs, batch, heads, parts, factor, bits, gradient_stream=None
):
    """P gradients float32 [B, N, T, D], then the product -> dy or its codes [M, P * H], row scale, dclip, dbias."""
    gradients, (y, _, clipped, y_error, weight_scale, key) = inputs[:-6], inputs[-6:]
    first, *rest = (gradient.permute(2, 0, 1, 3).reshape(gradient.shape[2] * batch, -1) for gradient in gradients)
    gradient = torch.cat([first * factor, *rest], dim=1)
    dbias = gradient.sum(dim=0)
    dy, row_scale, dclip = product_gradient.finish(
        gradient, y, clipped, y_error, weight_scale, key, bits=bits, stream=gradient_stream
    )
    return dy, row_scale, dclip, dbias


def split_backward_cpu(*tensors, batch, heads, parts, factor, bits, gradient_stream=None):
    gradients = tensors[:parts]
    y, y_scale, clipped, y_error, weight_scale, key, dy, row_scale, dclip, dbias = tensors[parts:]
    _, _, time, width = gradients[0].shape
    source = (None, 2, None, None, None, 1.0)
    if y is not None:
        source = product_gradient.arguments(y, y_scale, clipped, y_error, bits)
    loader.call(
        "lsq_split_heads_backward", *(*gradients, None, None)[:3], float(factor), parts, *source,
        weight_scale, key, gradient_stream or 0, dy, row_scale, dclip, dbias, time * batch, batch, heads, width,
    )


def split_backward_cuda(*tensors, batch, heads, parts, factor, bits, gradient_stream=None):
    gradients = tensors[:parts]
    y, _, clipped, y_error, weight_scale, key, dy, row_scale, dclip, dbias, partial = tensors[parts:]
    rows, columns = dy.shape
    defines, time = _head_defines(rows, columns, batch, heads, parts)
    return [
        launch(
            "heads.cu", "lsq_split_heads_backward", *(*gradients, None, None)[:3], y if clipped is not None else None,
            clipped, y_error, weight_scale, key, dy, row_scale, partial, rows, batch, time, gradient_stream or 0,
            float(factor), grid=len(partial), ROUNDED=int(row_scale is not None),
            **kernels.activation_define(*gradients, dy), **defines,
        ),
        kernels.finish_sums(partial, columns, (dbias,), dclip, kernels.clip_factor(y_error, bits)),
    ]


def split_backward_cuda_scratch(gradient, *_, parts, **attributes):
    batch, heads, time, width = gradient.shape
    return [kernels.partial_scratch(batch * time, parts * heads * width, 1)]


def split_differentiate(builder, operation):
    y, _, bias = operation.inputs
    product = builder.product(y)
    dy, row_scale, attributes = builder.product_gradient_outputs(product)
    codes = y if product.clipped is not None else None
    builder.emit(
        "split_heads_backward",
        (
            *(builder.gradient(output) for output in operation.outputs), codes,
            product.scale if codes is not None else None, product.clipped, product.error,
            product.weight_scale if row_scale else None, builder.key if row_scale else None,
        ),
        (dy, row_scale, builder.gradient_output(product.clip), builder.gradient_output(bias)),
        **operation.attributes, **attributes,
    )


def merge_unquantized(context, clip, *, bits, error=False):
    """context float32 [B, N, T, D] -> rows float32 [T * B, N * D]."""
    batch, heads, time, width = context.shape
    return context.permute(2, 0, 1, 3).reshape(time * batch, heads * width)


def merge_reference(context, clip, *, bits, error=False):
    """-> codes (or float32) [T * B, N * D], scale, clipped, error; clip [1] or None."""
    return product_gradient.round_or_keep(merge_unquantized(context, clip, bits=bits), clip, bits=bits, error=error)


def merge_cpu(context, clip, out, scale, clipped, error_out, *, bits, error=False):
    batch, heads, time, width = context.shape
    loader.call(
        "lsq_merge_heads", context, clip, product_gradient.largest_code(clip, bits), out, scale, clipped, error_out,
        time * batch, batch, heads, width,
    )


def merge_cuda(context, clip, out, scale, clipped, error_out, *, bits, error=False):
    batch, heads, time, width = context.shape
    rows, columns = time * batch, heads * width
    values, codes = kernels.destinations(out, clip)
    defines, _ = _head_defines(rows, columns, batch, heads, 1)
    return [
        launch(
            "heads.cu", "lsq_merge_heads", context, clip, values, codes, scale, clipped, error_out, TICKET, rows, batch,
            time, float(product_gradient.largest_code(clip, bits)), grid=row_blocks(rows, columns, most=MANY_BLOCKS),
            **kernels.activation_define(context, values), **kernels.product_define(None), **defines,
        )
    ]


def merge_backward_reference(gradient, *, batch, heads):
    """gradient float32 [T * B, N * D] -> [B, N, T, D]."""
    rows, columns = gradient.shape
    parts = gradient.view(rows // batch, batch, heads, columns // heads)
    return (parts.permute(1, 2, 0, 3).contiguous(),)


def merge_backward_cpu(gradient, dcontext, *, batch, heads):
    rows, columns = gradient.shape
    parts = gradient.view(rows // batch, batch, heads, columns // heads)
    dcontext.copy_(parts.permute(1, 2, 0, 3))


def merge_backward_cuda(gradient, dcontext, *, batch, heads):
    return split_cuda(gradient, None, None, dcontext, batch=batch, heads=heads, parts=1, factor=1.0, bits=8)


def merge_differentiate(builder, operation):
    context = operation.inputs[0]
    batch, heads = context.shape[:2]
    dcontext = builder.temporary("d_" + context.name, context.shape)
    builder.emit(
        "merge_heads_backward", (builder.gradient(operation.outputs[0]),), (dcontext,), batch=batch, heads=heads
    )
    builder.accumulate(context, dcontext)


register(
    OpDefinition(
        name="split_heads", reference=split_reference, cpu=split_cpu, cuda=split_cuda,
        differentiate=split_differentiate, recompute=True,
    )
)
register(
    OpDefinition(
        name="split_heads_backward", reference=split_backward_reference, cpu=split_backward_cpu,
        cuda=split_backward_cuda, cuda_scratch=split_backward_cuda_scratch,
    )
)
register(
    OpDefinition(
        name="merge_heads", reference=merge_reference, cpu=merge_cpu, cuda=merge_cuda,
        differentiate=merge_differentiate, unquantized=merge_unquantized,
    )
)
register(
    OpDefinition(
        name="merge_heads_backward", reference=merge_backward_reference, cpu=merge_backward_cpu,
        cuda=merge_backward_cuda,
    )
)
