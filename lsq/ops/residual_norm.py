"""bias_dropout_residual_layer_norm: what stands between two blocks, in one pass over each row.

    z = residual + dropout(y + bias);   out = (z - mean) * rstd * weight + bias_norm, as float, as codes, or both

y may be missing (a plain LayerNorm of the residual) and so may the norm (z is the result). LayerNorm: Ba et al. 2016,
biased variance. M rows, H columns; float32 throughout.
"""

from lsq.csrc import loader
from lsq.csrc.geometry import MANY_BLOCKS, row_blocks, row_defines, sums_in_shared_memory
from lsq.csrc.launch import TICKET, launch
from lsq.ops import kernels, product_gradient, rounding
from lsq.ops.random import dropout as drop
from lsq.ops.random import dropout_threshold, keep_factor
from lsq.ops.registry import OpDefinition, register


def _values(y, y_scale, bias, residual, weight, norm_bias, key, dropout, stream, epsilon):
    z = residual
    if y is not None:
        z = z + drop(rounding.read_product(y, y_scale) + bias, dropout, key, stream)
    if weight is None:
        return z, None, None, None
    mean = z.mean(dim=1)
    centred = z - mean[:, None]
    rstd = (centred.square().mean(dim=1) + epsilon).rsqrt()
    return z, mean, rstd, centred * rstd[:, None] * weight + norm_bias


def unquantized(
    y, y_scale, bias, residual, weight, norm_bias, clip, key, *, dropout, stream, epsilon, bits, error=False
):
    """-> out float32 [M, H], which is about to be rounded."""
    return _values(y, y_scale, bias, residual, weight, norm_bias, key, dropout, stream, epsilon)[3]


def reference(
    y, y_scale, bias, residual, weight, norm_bias, clip, key, *, dropout, stream, epsilon, bits, error=False
):
    """-> z [M, H], mean [M], rstd [M], out [M, H] (None without a norm), codes, scale, clipped, error (with a clip)."""
    z, mean, rstd, out = _values(y, y_scale, bias, residual, weight, norm_bias, key, dropout, stream, epsilon)
    rounded = (None,) * 4
    if clip is not None:
        rounded = rounding.round_activation(out, clip, bits=bits, error=error)
    return z, mean, rstd, out, *rounded


def cpu(
    y, y_scale, bias, residual, weight, norm_bias, clip, key, z, mean, rstd, out, codes, scale, clipped, error_out,
    *, dropout, stream, epsilon, bits, error=False,
):
    rows, columns = residual.shape
    source = (None, 2, None) if y is None else product_gradient.arguments(y, y_scale, None, None, bits)[:3]
    loader.call(
        "lsq_residual_norm", *source, bias, residual, weight, norm_bias, clip, key, stream,
        dropout_threshold(dropout), keep_factor(dropout), float(epsilon),
        product_gradient.largest_code(clip, bits), z, mean, rstd, out, codes, scale, clipped, error_out, rows, columns,
    )


def cuda(
    y, y_scale, bias, residual, weight, norm_bias, clip, key, z, mean, rstd, out, codes, scale, clipped, error_out,
    *, dropout, stream, epsilon, bits, error=False,
):
    rows, columns = residual.shape
    largest = float(product_gradient.largest_code(clip, bits))
    return [
        launch(
            "residual_norm.cu", "lsq_residual_norm", y, y_scale, bias, residual, weight, norm_bias,
            clip if codes is not None else None, key, z, mean, rstd, out, codes, scale, clipped, error_out, TICKET,
            rows, *kernels.dropout_arguments(dropout, stream), float(epsilon), largest,
            grid=row_blocks(rows, columns, most=MANY_BLOCKS), **kernels.activation_define(y, residual, z, out),
            **kernels.product_define(y), **row_defines(columns),
        )
    ]


def backward_reference(
    dout, dz, z, mean, rstd, weight, y, y_scale, clipped, y_error, weight_scale, key,
    *, product, dropout, stream, bits, gradient_stream=None,
):
    """dout [M, H] of the norm's result (None without a norm), dz [M, H] of z itself (or None).

    -> dresidual [M, H], dweight [H], dnorm_bias [H], dy or its codes [M, H], row scale [M], dclip of y [1], dbias [H]
    """
    dweight = dnorm_bias = None
    dresidual = dz
    if dout is not None:
        normalised = (z - mean[:, None]) * rstd[:, None]
        dweight, dnorm_bias = (dout * normalised).sum(dim=0), dout.sum(dim=0)
        scaled = dout * weight
        projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
        dresidual = rstd[:, None] * (scaled - scaled.mean(dim=1, keepdim=True) - projected)
        if dz is not None:
            dresidual = dresidual + dz
    if not product:
        return dresidual, dweight, dnorm_bias, None, None, None, None
    gradient = drop(dresidual, dropout, key, stream)
    dbias = gradient.sum(dim=0)
    dy, row_scale, dclip = product_gradient.finish(
        gradient, y, clipped, y_error, weight_scale, key, bits=bits, stream=gradient_stream
    )
    return dresidual, dweight, dnorm_bias, dy, row_scale, dclip, dbias


def backward_cpu(
    dout, dz, z, mean, rstd, weight, y, y_scale, clipped, y_error, weight_scale, key,
    dresidual, dweight, dnorm_bias, dy, row_scale, dclip, dbias,
    *, product, dropout, stream, bits, gradient_stream=None,
):
    rows, columns = (dout if dout is not None else dz).shape
    source = (None, 2, None, None, None, 1.0)
    if y is not None:
        source = product_gradient.arguments(y, y_scale, clipped, y_error, bits)
    loader.call(
        "lsq_residual_norm_backward", dout, dz, z, mean, rstd, weight, *source, key, stream,
        dropout_threshold(dropout), keep_factor(dropout), weight_scale, gradient_stream or 0,
        dresidual, dweight, dnorm_bias, dy, row_scale, dclip, dbias, rows, columns,
    )


def _backward_sums(dout, product):
    """Columns' worth of sums that the backward pass takes: two for the norm, one for the bias of the product."""
    return (2 if dout is not None else 0) + int(product)


def backward_cuda(
    dout, dz, z, mean, rstd, weight, y, y_scale, clipped, y_error, weight_scale, key,
    dresidual, dweight, dnorm_bias, dy, row_scale, dclip, dbias, partial,
    *, product, dropout, stream, bits, gradient_stream=None,
):
    rows, columns = (dout if dout is not None else dz).shape
    outs = ((dweight, dnorm_bias) if dout is not None else ()) + ((dbias,) if product else ())
    if not outs:
        return []
    codes = y if clipped is not None else None
    shared = sums_in_shared_memory(columns, 2) if dout is not None else 0
    drop_stream, threshold, keep = kernels.dropout_arguments(dropout, stream)
    return [
        launch(
            "residual_norm.cu", "lsq_residual_norm_backward", dout, dz, z, mean, rstd, weight, codes, clipped, y_error,
            weight_scale, key, dresidual, dy, row_scale, partial, rows, drop_stream, threshold, gradient_stream or 0,
            keep, grid=len(partial), shared=shared, NORMED=int(dout is not None), PRODUCT=int(product),
            ROUNDED=int(row_scale is not None), **kernels.activation_define(dout, dz, z, dresidual, dy),
            **row_defines(columns),
        ),
        kernels.finish_sums(partial, columns, outs, dclip, kernels.clip_factor(y_error, bits)),
    ]


def backward_cuda_scratch(dout, dz, *_, product, **attributes):
    rows, columns = (dout if dout is not None else dz).shape
    return [kernels.partial_scratch(rows, columns, _backward_sums(dout, product))]


def differentiate(builder, operation):
    y, _, bias, residual, weight, norm_bias, _, key = operation.inputs
    z, mean, rstd, out, codes = operation.outputs[:5]
    dout = builder.gradient_sum(out, codes) if weight is not None else None
    dz = builder.gradient(z) if z is not None and builder.has_gradient(z) else None
    names = operation.attributes
    # Without a norm, the gradient of z is the gradient of the residual.
    dresidual = builder.temporary("d_" + residual.name, residual.shape) if weight is not None else None
    product_inputs, product_outputs, attributes = (None,) * 5, (None,) * 4, {}
    if y is not None:
        product = builder.product(y)
        dy, row_scale, attributes = builder.product_gradient_outputs(product)
        # The sums of an int32 product are not read again: nothing of them is saved.
        codes_of_y = y if product.clipped is not None else None
        product_inputs = (
            codes_of_y, product.scale if codes_of_y else None, product.clipped, product.error,
            product.weight_scale if row_scale else None,
        )
        product_outputs = (dy, row_scale, builder.gradient_output(product.clip), builder.gradient_output(bias))
    z_saved = z if y is not None else residual
    builder.emit(
        "bias_dropout_residual_layer_norm_backward",
        (dout, dz, z_saved if weight is not None else None, mean, rstd, weight, *product_inputs, key),
        (
            dresidual,
            builder.gradient_output(weight) if weight is not None else None,
            builder.gradient_output(norm_bias) if weight is not None else None,
            *product_outputs,
        ),
        product=y is not None, dropout=names["dropout"], stream=names["stream"], bits=names["bits"], **attributes,
    )
    builder.accumulate(residual, dresidual if dresidual is not None else dz)


register(
    OpDefinition(
        name="bias_dropout_residual_layer_norm", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate,
        unquantized=unquantized,
    )
)
register(
    OpDefinition(
        name="bias_dropout_residual_layer_norm_backward", reference=backward_reference, cpu=backward_cpu,
        cuda=backward_cuda, cuda_scratch=backward_cuda_scratch,
    )
)
