"""Backward products of an integer product y = x (codes [M, K]) times weight (codes [N, K]) transposed.

Under backward="float" the gradient is float32 [M, N] and multiplies the dequantised codes. Under backward="int8"
it is codes [M, N] with row scales r[M] of gradient * weight_scale (see linear.py):

    dx[m, k]      = r[m] * sum_n codes[m, n] * weight[n, k]
    dweight[n, k] = x_scale / weight_scale[n] * sum_m codes[m, n] * (r[m] * x[m, k])       r * x rounded per column

Both apply the straight-through mask of their own operand and yield the gradient of its clip.
"""

import torch

from lsq import gemm, quant
from lsq.csrc import loader
from lsq.ops import linear_gradient_cuda, rounding
from lsq.ops.registry import OpDefinition, register


def _float_product(a, b, dtype):
    """a [M, K] float32 times b [K, N] in `dtype`, float32 result."""
    dtype = getattr(torch, dtype)
    return (a.to(dtype) @ b.to(dtype)).to(torch.float32)


def input_reference(gradient, row_scale, weight, weight_scale, codes, clipped, error, *, bits, dtype="float32"):
    """-> dx float32 [M, K] before the rounding of x, dclip [1]."""
    if row_scale is None:
        dx = _float_product(gradient, weight.to(torch.float32) * weight_scale[:, None], dtype)
    else:
        dx = gemm.reference(gradient, weight.t()).to(torch.float32) * row_scale[:, None]
    return rounding.straight_through(dx, codes, clipped, error, bits=bits)


def input_scratch(gradient, row_scale, weight, weight_scale, codes, clipped, error, *, bits, dtype="float32"):
    if row_scale is not None:
        return [gemm.scratch_for("linear_input_gradient", *codes.shape, gradient.shape[1])]
    return [(weight.shape, getattr(torch, dtype)), *_narrow_scratch(gradient.shape, codes.shape, dtype)]


def input_cpu(
    gradient, row_scale, weight, weight_scale, codes, clipped, error, dx, dclip, *scratch, bits, dtype="float32"
):
    columns = codes.shape[1]
    factor = 1.0 if error is None else rounding.lsq_factor(codes.numel(), bits)
    dclip.zero_()
    if row_scale is None:
        floats, *narrow = scratch
        torch.mul(weight, weight_scale[:, None], out=floats)
        _float_product_into(dx, gradient, floats, narrow)
        blocks = [(0, dx)]
    else:
        blocks = gemm.row_blocks("linear_input_gradient", gradient, weight.t(), *scratch)
    for first, product in blocks:
        loader.call(
            "lsq_straight_through", product, row_scale, codes, clipped, error, factor, dx, dclip,
            first, product.shape[0], columns,
        )


def _narrow_scratch(gradient, product, dtype):
    """What `_float_product_into` needs beside a product in `dtype`: shapes of the gradient and of the product."""
    return [] if dtype == "float32" else [(gradient, getattr(torch, dtype)), (product, getattr(torch, dtype))]


def _float_product_into(out, a, b, narrow):
    """out [M, N] float32 = a [M, K] float32 times b [K, N], computed in b's dtype in the tensors `narrow`."""
    if not narrow:
        torch.mm(a, b, out=out)
        return
    a_narrow, product = narrow
    a_narrow.copy_(a)
    torch.mm(a_narrow, b, out=product)
    out.copy_(product)


def weight_reference(
    gradient, row_scale, codes, scale, weight_scale, weight, clip, key, *, bits, clip_gradient, stream=0,
    dtype="float32",
):
    """-> dweight float32 [N, K] before the rounding of the weight, dclip like clip, [N] or [1]."""
    if row_scale is None:
        product = _float_product(gradient.t(), codes.to(torch.float32) * scale, dtype)
    else:
        scaled, column_scale = rounding.round_columns(codes.to(torch.float32) * row_scale[:, None], key, stream)
        product = gemm.reference(gradient.t(), scaled.t()).to(torch.float32)
        product = product * (column_scale * scale) / weight_scale[:, None]
    product = product[: weight.shape[0]]  # without the padding of a vocabulary
    return weight_straight_through(product, weight, clip, bits=bits, clip_gradient=clip_gradient)


def weight_straight_through(product, weight, clip, *, bits, clip_gradient):
    """Mask a weight's gradient [N, K] by |weight| <= clip and sum what belongs to the clip, [N] or [1]."""
    limit = clip.reshape(-1, 1)
    outside = weight.abs() > limit
    contribution = torch.where(outside, product * weight.sign(), 0.0)
    if clip_gradient == "lsq":
        codes, scale, _ = quant.quantize(weight, clip, bits)
        rounded = codes.to(torch.float32) * scale.reshape(-1, 1)
        contribution = torch.where(outside, contribution, product * (rounded - weight) / limit)
        contribution = contribution * rounding.lsq_factor(weight.numel() // clip.numel(), bits)
    dclip = contribution.sum(dim=1) if clip.numel() > 1 else contribution.sum().reshape(1)
    return torch.where(outside, 0.0, product), dclip


def weight_scratch(
    gradient, row_scale, codes, scale, weight_scale, weight, clip, key, *, bits, clip_gradient, stream=0,
    dtype="float32",
):
    rows, columns = gradient.shape[1], codes.shape[1]
    sums = ((weight.shape[0],), torch.float32)
    if row_scale is not None:
        rounded = [(codes.shape, torch.int8), ((columns,), torch.float32)]
        return [sums, *rounded, gemm.scratch_for("linear_weight_gradient", rows, columns, codes.shape[0])]
    product = (rows, columns)
    floats = [(product, torch.float32), (codes.shape, getattr(torch, dtype))]
    return [sums, *floats, *_narrow_scratch((rows, codes.shape[0]), product, dtype)]


def weight_cpu(
    gradient, row_scale, codes, scale, weight_scale, weight, clip, key, dweight, dclip, sums, *scratch, bits,
    clip_gradient, stream=0, dtype="float32",
):
    rows, columns = weight.shape
    per_clip = weight.numel() // clip.numel()
    in_range = clip_gradient == "lsq"
    if row_scale is None:
        product, floats, *narrow = scratch
        torch.mul(codes, scale, out=floats)
        _float_product_into(product, gradient.t(), floats, narrow)
        column_scale, blocks = None, [(0, product)]
    else:
        rounded, column_scale, memory = scratch
        round_columns(codes, row_scale, key, stream, rounded, column_scale)
        column_scale.mul_(scale)
        blocks = gemm.row_blocks("linear_weight_gradient", gradient.t(), rounded.t(), memory)
    for first, product in blocks:
        loader.call(
            "lsq_weight_straight_through", product, column_scale, weight_scale, weight, clip, clip.numel(),
            quant.maximum_code(bits), in_range, dweight, sums, first, min(product.shape[0], rows - first), columns,
        )
    sums.mul_(rounding.lsq_factor(per_clip, bits) if in_range else 1.0)
    torch.sum(sums.view(clip.numel(), -1), dim=1, out=dclip)


def round_columns(codes, row_scale, key, stream, rounded, column_scale):
    """codes int8 [M, K] * row_scale [M], rounded per column at random, into rounded int8 [M, K], scale float32 [K]."""
    loader.call("lsq_round_columns", codes, row_scale, key, stream, rounded, column_scale, *codes.shape)


register(
    OpDefinition(
        name="linear_input_gradient", reference=input_reference, cpu=input_cpu, scratch=input_scratch,
        cuda=linear_gradient_cuda.input_gradient, cuda_scratch=linear_gradient_cuda.input_scratch,
    )
)
register(
    OpDefinition(
        name="linear_weight_gradient", reference=weight_reference, cpu=weight_cpu, scratch=weight_scratch,
        cuda=linear_gradient_cuda.weight_gradient, cuda_scratch=linear_gradient_cuda.weight_scratch,
    )
)
