"""The CUDA side of linear_gradient.py: products of transposed int8 operands, or of dequantised ones.

M rows, N outputs, K inputs. Transposed operands are [K, N], [N, P] and [K, P], P being M padded to a multiple of 16.
"""

import torch

from lsq import quant
from lsq.csrc.geometry import MANY_BLOCKS, patches, row_blocks, row_defines
from lsq.csrc.launch import Product, float_define, launch
from lsq.ops import rounding
from lsq.ops.kernels import add_parts, check_columns, float_operand
from lsq.ops.linear import int8_products
from lsq.ops.transpose import column_scratch, round_columns_transposed, transpose_codes, transposed_scratch

_PRODUCTS = {torch.int32: 0, torch.float32: 1}
"""-DPRODUCT by dtype; else 2: Float."""


def input_scratch(gradient, row_scale, weight, weight_scale, codes, clipped, error, *, bits, dtype="float32"):
    blocks = patches(*codes.shape)
    parts = ((blocks[0] * blocks[1],), torch.float32)
    if row_scale is not None:
        return [parts, (weight.t().shape, torch.int8), (codes.shape, torch.int32)]
    return [
        parts, (weight.shape, getattr(torch, dtype)), *_converted_gradient(gradient, dtype),
        *_apart(codes.shape, gradient.dtype, dtype),
    ]


def input_gradient(
    gradient, row_scale, weight, weight_scale, codes, clipped, error, dx, dclip, parts, *scratch, bits, dtype="float32"
):
    """Takes what linear_gradient.input_cpu takes; dx and a gradient that is no codes have the activations' dtype."""
    rows, columns = codes.shape
    if row_scale is not None:
        weight_transposed, product = scratch
        entries = [transpose_codes(weight, weight_transposed), *int8_products(gradient, weight_transposed, product)]
    else:
        float_define(gradient, dx)
        dequantised, *scratch = scratch
        operands, gradient, scratch = _in_dtype(gradient, dequantised.dtype, scratch)
        product = scratch[0] if scratch else dx
        entries = [float_operand(weight, weight_scale, dequantised), *operands]
        if rows:
            entries.append(Product(a=gradient, b=dequantised, out=product, transpose_b=True))
    factor = 1.0 if error is None or rows == 0 else rounding.lsq_factor(codes.numel(), bits)
    mask = launch(
        "linear_gradient.cu", "lsq_input_gradient", product, row_scale, codes, clipped, error, dx, parts, rows, columns,
        grid=patches(rows, columns), **float_define(dx), **_product_define(product), **row_defines(columns),
    )
    return [*entries, mask, add_parts(parts, dclip, factor)]


def weight_scratch(
    gradient, row_scale, codes, scale, weight_scale, weight, clip, key, *, bits, clip_gradient, stream=0,
    dtype="float32",
):
    rows, outputs = gradient.shape
    columns = codes.shape[1]
    sums = ((weight.shape[0],), torch.float32)
    if row_scale is not None:
        return [
            sums, transposed_scratch(rows, outputs), transposed_scratch(rows, columns), ((columns,), torch.float32),
            *column_scratch(rows, columns), ((outputs, columns), torch.int32),
        ]
    return [
        sums, ((outputs, columns), torch.float32), (codes.shape, getattr(torch, dtype)),
        *_converted_gradient(gradient, dtype),
    ]


def weight_gradient(
    gradient, row_scale, codes, scale, weight_scale, weight, clip, key, dweight, dclip, sums, *scratch, bits,
    clip_gradient, stream=0, dtype="float32",
):
    """Takes what linear_gradient.weight_cpu takes; a gradient that is no codes has the dtype of activations."""
    rows, columns = codes.shape
    column_scale = None
    if row_scale is not None:
        gradient_transposed, rounded, column_scale, partial, reciprocal, product = scratch
        entries = [
            transpose_codes(gradient, gradient_transposed),
            *round_columns_transposed(
                codes, row_scale, None, key, stream, rounded, column_scale, partial, reciprocal
            ),
            *int8_products(gradient_transposed, rounded, product),
        ]
    else:
        product, dequantised, *scratch = scratch
        operands, gradient, _ = _in_dtype(gradient, dequantised.dtype, scratch)
        entries = [float_operand(codes, scale, dequantised), *operands]
        entries.append(Product(a=gradient, b=dequantised, out=product, transpose_a=True, transpose_b=True))
        if rows == 0:
            entries, product = [], None
    lsq = clip_gradient == "lsq"
    factor = rounding.lsq_factor(weight.numel() // clip.numel(), bits) if lsq else 1.0
    per_channel = clip.numel() > 1
    mask = launch(
        "linear_gradient.cu", "lsq_weight_gradient", product, column_scale, scale, weight_scale, weight, clip, dweight,
        dclip if per_channel and dclip is not None else sums, clip.numel(), int(lsq), weight.shape[0],
        float(quant.maximum_code(bits)), factor, grid=row_blocks(*weight.shape, most=MANY_BLOCKS),
        FLOAT=0, **_product_define(product), **row_defines(columns),
    )
    return [*entries, mask] if per_channel else [*entries, mask, add_parts(sums, dclip)]


def _product_define(product):
    return {"PRODUCT": 1 if product is None else _PRODUCTS.get(product.dtype, 2)}


def _converted_gradient(gradient, dtype):
    """Scratch for the gradient in the dtype of the product, where it has another."""
    return [] if gradient.dtype == getattr(torch, dtype) else [(gradient.shape, getattr(torch, dtype))]


def _apart(shape, activations, dtype):
    """Scratch for a product in `dtype` that cannot be written as activations; empty where it can."""
    written = {torch.float32, getattr(torch, dtype)}
    return [] if activations in written else [(shape, torch.float32)]


def _in_dtype(gradient, dtype, scratch):
    """(launches, the gradient in `dtype`, scratch that is left)."""
    check_columns(8, **{"the width of a gradient": gradient.shape[1]})
    if gradient.dtype == dtype:
        return [], gradient, scratch
    converted, *scratch = scratch
    return [float_operand(gradient, None, converted)], converted, scratch
