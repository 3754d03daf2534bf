"""Layers as forward operations. Each function appends to a Builder; gradients follow by themselves.

Names of parameters are relative to `prefix`, as in a module's state dict. M rows, H hidden, F feed-forward.
"""

import torch

from lsq.config import LayerConfig
from lsq.program.builder import Builder
from lsq.program.tensor import Product, Rounded, RoundedWeight, VirtualTensor


def rounded_outputs(builder: Builder, name: str, shape) -> tuple[VirtualTensor, ...]:
    """(codes, scale, clipped, error): what a rounding writes; the error only where clips learn by LSQ."""
    numel = 1
    for length in shape:
        numel *= length
    error = builder.temporary(name + ".error", shape) if keeps_error(builder) else None
    return (
        builder.temporary(name + ".codes", shape, torch.int8),
        builder.temporary(name + ".scale", (1,)),
        builder.temporary(name + ".clipped", (-(-numel // 8),), torch.uint8),
        error,
    )


def keeps_error(builder: Builder) -> bool:
    return builder.backward and builder.quant.clip_gradient == "lsq"


def _rounding(builder: Builder) -> dict:
    return {"bits": builder.quant.bits, "error": keeps_error(builder)}


def _as_rounded(builder, outputs, clip, source=None) -> Rounded:
    codes, scale, clipped, error = outputs
    group = Rounded(
        codes=codes, scale=scale, clipped=clipped, error=error, clip=clip, source=source or codes
    )
    builder.group(codes, group)
    return group


def quantize(builder: Builder, x: VirtualTensor, clip: str) -> Rounded | VirtualTensor:
    """Round x [M, N] under the clip parameter of that name; x itself in float mode."""
    if not builder.quant.quantized:
        return x
    parameter = builder.parameter(clip, (1,))
    outputs = rounded_outputs(builder, clip.removesuffix("_clip"), x.shape)
    builder.emit("quantize", (x, parameter), outputs, **_rounding(builder))
    return _as_rounded(builder, outputs, parameter, x)


def quantized_weight(builder: Builder, name: str, shape, rows: int | None = None) -> RoundedWeight:
    """Codes [N, K] and scale [N] of a weight: rounded here, or brought along where there is no backward pass.

    `rows` above N pads the codes, as the int8 product of a vocabulary needs.
    """
    padded = (rows or shape[0], shape[1])
    if not builder.backward:
        codes = builder.input(name + ".codes", padded, torch.int8)
        scale = builder.input(name + ".scale", padded[:1])
        return RoundedWeight(codes=codes, scale=scale, parameter=None, clip=None)
    weight = builder.parameter(name, shape)
    clips = shape[0] if builder.quant.weight_granularity == "channel" else 1
    clip = builder.parameter(name + "_clip", (clips,))
    codes = builder.temporary(name + ".codes", padded, torch.int8)
    scale = builder.temporary(name + ".scale", padded[:1])
    builder.emit("quantize_weight", (weight, clip), (codes, scale), bits=builder.quant.bits, rows=rows)
    group = RoundedWeight(codes=codes, scale=scale, parameter=weight, clip=clip)
    builder.group(codes, group)
    return group


def linear(
    builder: Builder, x: Rounded | VirtualTensor, weight: str, shape, *, clip: str | None, output: str,
    rows: int | None = None,
) -> Product:
    """Product with a weight of `shape` [N, K]; rounded under `clip`, or left as int32 sums where that is None.

    `rows` above N pads the weight's codes and so the columns of the result.
    """
    if isinstance(x, VirtualTensor):
        y = builder.temporary(output, (x.shape[0], shape[0]))
        builder.emit("linear", (x, builder.parameter(weight, shape)), (y,))
        product = Product(value=y)
    else:
        w = quantized_weight(builder, weight, shape, rows)
        inputs = (x.codes, x.scale, w.codes, w.scale)
        result = (x.codes.shape[0], w.codes.shape[0])
        if clip is None:
            sums = builder.temporary(output, result, torch.int32)
            scale = builder.temporary(output + ".scale", result[1:])
            builder.emit("linear_int32", inputs, (sums, scale))
            product = Product(value=sums, scale=scale, weight_scale=w.scale)
        else:
            parameter = builder.parameter(clip, (1,))
            outputs = rounded_outputs(builder, output, result)
            builder.emit("linear_int8", (*inputs, parameter), outputs, **_rounding(builder))
            codes, scale, clipped, error = outputs
            product = Product(
                value=codes, scale=scale, clipped=clipped, error=error, clip=parameter, weight_scale=w.scale
            )
    builder.group(product.value, product)
    return product


def attention(
    builder: Builder, config: LayerConfig, q, k, v, padding, *, prefix: str, causal: bool
) -> Rounded | VirtualTensor:
    """Heads [B, N, T, D] -> context rows [T * B, H], rounded."""
    context = builder.temporary(prefix + "context", q.shape)
    dropout = config.attention_dropout if builder.training else 0.0
    builder.emit(
        "attention", (q, k, v, padding, builder.key), (context,),
        causal=causal, dropout=dropout, stream=builder.next_stream(),
    )
    batch, heads, time, width = q.shape
    rows = (time * batch, heads * width)
    if not builder.quant.quantized:
        merged = builder.temporary(prefix + "context.rows", rows)
        builder.emit("merge_heads", (context, None), (merged, None, None, None), **_rounding(builder))
        return merged
    clip = builder.parameter(prefix + "context_clip", (1,))
    outputs = rounded_outputs(builder, prefix + "context", rows)
    builder.emit("merge_heads", (context, clip), outputs, **_rounding(builder))
    return _as_rounded(builder, outputs, clip)


def split_heads(builder: Builder, product: Product, bias: str, names, *, batch: int, heads: int, scale_first: bool):
    """Product [T * B, P * H] -> P tensors [B, N, T, D]; the first is multiplied by D^-0.5 where it holds queries."""
    rows, columns = product.value.shape
    width = columns // (len(names) * heads)
    outputs = tuple(builder.temporary(name, (batch, heads, rows // batch, width)) for name in names)
    builder.emit(
        "split_heads", (product.value, product.scale, builder.parameter(bias, (columns,))), outputs,
        batch=batch, heads=heads, parts=len(names), factor=width**-0.5 if scale_first else 1.0, bits=builder.quant.bits,
    )
    return outputs


def activation(builder: Builder, config: LayerConfig, product: Product, bias: str, *, prefix: str):
    """Bias, activation and dropout on a product [M, F], rounded."""
    shape = product.value.shape
    quantized = builder.quant.quantized
    clip = builder.parameter(prefix + "activation_clip", (1,)) if quantized else None
    if quantized:
        outputs = rounded_outputs(builder, prefix + "activation", shape)
    else:
        outputs = (builder.temporary(prefix + "activation", shape), None, None, None)
    builder.emit(
        "bias_activation_dropout",
        (product.value, product.scale, builder.parameter(bias, shape[1:]), clip, builder.key),
        outputs,
        activation=config.activation,
        dropout=config.activation_dropout if builder.training else 0.0,
        stream=builder.next_stream(),
        **_rounding(builder),
    )
    return _as_rounded(builder, outputs, clip) if quantized else outputs[0]


def residual_norm(
    builder: Builder, config: LayerConfig, product: Product | None, bias: str | None, residual: VirtualTensor,
    *, norm: str | None, clip: str | None, name: str, keep_float: bool,
):
    """What stands between two blocks: -> (z, normalised float or None, Rounded or None).

    `product` None: a LayerNorm alone. `norm` None: the sum alone. `clip`: round the result of the norm under it.
    """
    rows, columns = residual.shape
    quantized = clip is not None and builder.quant.quantized
    z = builder.temporary(name + ".sum", residual.shape) if product else None
    mean = rstd = out = weight = norm_bias = None
    if norm:
        mean, rstd = (builder.temporary(f"{name}.{part}", (rows,)) for part in ("mean", "rstd"))
        weight, norm_bias = (builder.parameter(f"{norm}.{part}", (columns,)) for part in ("weight", "bias"))
        if keep_float or not quantized:
            out = builder.temporary(name + ".normalised", residual.shape)
    clip_parameter = builder.parameter(clip, (1,)) if quantized else None
    rounded = rounded_outputs(builder, clip.removesuffix("_clip"), residual.shape) if quantized else (None,) * 4
    builder.emit(
        "bias_dropout_residual_layer_norm",
        (
            product.value if product else None, product.scale if product else None,
            builder.parameter(bias, (columns,)) if product else None,
            residual, weight, norm_bias, clip_parameter, builder.key,
        ),
        (z, mean, rstd, out, *rounded),
        dropout=config.dropout if product and builder.training else 0.0,
        stream=builder.next_stream(), epsilon=config.layer_norm_epsilon, **_rounding(builder),
    )
    group = _as_rounded(builder, rounded, clip_parameter, out) if quantized else None
    return z if product else residual, out, group


def read(builder: Builder, product: Product, bias: str | None) -> VirtualTensor:
    """The float values of a product, with the bias: how a block that stands alone ends."""
    shape = product.value.shape
    out = builder.temporary("result", shape)
    builder.emit(
        "read_product",
        (product.value, product.scale, builder.parameter(bias, shape[1:]) if bias else None),
        (out,),
        bits=builder.quant.bits,
    )
    return out


def append_time(builder: Builder, before: VirtualTensor, now: VirtualTensor) -> VirtualTensor:
    """[B, N, P, D] and [B, N, 1, D] -> [B, N, P + 1, D]; for decoding, without a gradient."""
    batch, heads, past, width = before.shape
    out = builder.temporary(now.name + ".all", (batch, heads, past + now.shape[2], width))
    builder.emit("append_time", (before, now), (out,))
    return out


def cross_entropy(
    builder: Builder, x: Rounded | VirtualTensor, weight: str, shape, target: VirtualTensor, *, rows: int, padding: int,
    smoothing: float,
) -> tuple[VirtualTensor, VirtualTensor]:
    """Vocabulary projection and label-smoothed cross-entropy in one: -> (loss [1], nll loss [1])."""
    if isinstance(x, VirtualTensor):
        operands = (x, None, builder.parameter(weight, shape), None)
    else:
        w = quantized_weight(builder, weight, shape, rows)
        operands = (x.codes, x.scale, w.codes, w.scale)
    loss, nll = builder.temporary("loss", (1,)), builder.temporary("nll_loss", (1,))
    count, columns = operands[0].shape[0], operands[2].shape[0]
    codes = row_scale = normaliser = stream = None
    if builder.backward and builder.quant.quantized and builder.quant.backward == "int8":
        codes = builder.temporary("d_logits", (count, columns), torch.int8)
        row_scale = builder.temporary("d_logits.row_scale", (count,))
        stream = builder.next_stream()
    elif builder.backward:
        normaliser = builder.temporary("log_normaliser", (count,))
    builder.emit(
        "vocabulary_cross_entropy", (*operands, target, builder.key), (loss, nll, normaliser, codes, row_scale),
        vocabulary=shape[0], padding=padding, smoothing=smoothing, stream=stream,
    )
    return loss, nll
