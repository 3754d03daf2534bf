"""Blocks of Transformer layers as forward operations on a LayerBuilder.

A block declares its parameters, whose names begin with `prefix`, and names the clip of each value
that it rounds. M rows, H hidden size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lsq.config import Adapter, LayerConfig
from lsq.layers.builder import Epilogue, LayerBuilder
from lsq.layers.positions import position_bias, rotate_heads
from lsq.ops.adapter import Adapt, AdapterInput
from lsq.ops.attention import Append, Attention, Heads, PositionBias, Projected
from lsq.ops.gated import Gated
from lsq.ops.nonlinearity import Activation
from lsq.ops.residual_norm import NormalisedRows, ResidualNorm, ResidualSum
from lsq.program.tensor import Kind, VirtualTensor, fan_in, xavier
from lsq.program.values import Rows
from lsq.quant import NORMALISED


def filled(rows: int) -> int:
    """Round a number of rows up to one of four sizes between two powers of two, at least 16."""
    step = max(16, 2 ** (max(rows - 1, 1).bit_length() - 3))
    return -(-rows // step) * step


@dataclass(frozen=True, kw_only=True)
class PackedSequences:
    """Sizes of a batch of sentences, packed in rows one after another."""

    rows: int
    """M: the tokens of all sentences."""
    count: int

    def filled(self) -> "PackedSequences":
        """Round both sizes up, so that few different programs are built."""
        rows = filled(self.rows)
        count = -(-rows // 16)
        while count < self.count:
            count *= 2
        return PackedSequences(rows=rows, count=count)

    def cu_seqlens(self, builder: LayerBuilder, name: str) -> VirtualTensor:
        """Declare the input int32 [B + 1] with the first row of each sentence, then M."""
        return builder.input(name, (self.count + 1,), torch.int32)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Keys and values in one tensor [S, ...]: values in the columns after the keys."""

    rows: Rows
    key_column: int
    cu_seqlens: VirtualTensor


class AdaptedBuilder(LayerBuilder):
    """A builder that adds adapters to products, before their epilogues."""

    def __init__(self, *arguments, adapters: Iterable[Adapter], **options):
        super().__init__(*arguments, **options)
        self._adapters = {one.weight: one for one in adapters}

    def project(self, x: Rows, weight: str, shape: tuple[int, int], end: Epilogue, **options):
        adapter = self._adapters.get(weight)
        if adapter is None:
            return super().project(x, weight, shape, end, **options)
        base = super().project(x, weight, shape, Epilogue(name=end.name + ".base"), **options)
        base, name = base.floats, weight.removesuffix("weight") + "adapter"
        (rows, inputs), rank = x.tensor.shape, adapter.rank
        dropout = self.dropout(adapter.dropout)
        values = self.tensor(name + ".input", x.tensor.shape)
        self.add(AdapterInput(x=x, dropout=dropout, values=values))
        y = self.result(end.name, base.shape, end.clip, dtype=end.dtype)
        self.add(
            Adapt(
                x=x,
                dropout=dropout,
                values=values,
                base=base,
                out=y.out,
                rounded=y.rounded,
                nonlinearity=self.nonlinearity(end.name, base.shape, end.activation, end.dropout),
                down=self.parameter(name + "_down", (rank, inputs), Kind.ADAPTER),
                up=self.parameter(name + "_up", (base.shape[1], rank), Kind.ADAPTER),
                hidden=self.tensor(name + ".hidden", (rows, rank)),
            )
        )
        return y.rows


def bias_of(config: LayerConfig, name: str) -> str | None:
    """Return the name of a projection's bias; None if projections have no bias."""
    return name + "_bias" if config.bias else None


def project_heads(
    builder: LayerBuilder, config: LayerConfig, x: Rows, name: str, parts: int
) -> Rows:
    """Project x to queries (1 part), keys and values (2), or all three (3), which may rotate."""
    hidden, rotates = config.hidden, parts == 3 and config.rotary is not None
    columns = parts % 2 * config.query_columns + parts // 2 * 2 * config.key_columns
    heads = builder.project(
        x,
        name + "_weight",
        (columns, hidden),
        Epilogue(
            name=name + ".unrotated" if rotates else name, clip=None if rotates else name + "_clip"
        ),
        bias=name + "_bias" if config.biased_heads else None,
        bias_bound=fan_in(hidden),
        bound=xavier(hidden, hidden) / math.sqrt(2),
        in_out=config.in_out,
    )
    if not rotates:
        return heads
    rotated = builder.result(name, heads.floats.shape, name + "_clip")
    rotate_heads(builder, config, heads.floats, rotated, name.removesuffix("qkv"))
    return rotated.rows


def project_memory(
    builder: LayerBuilder, config: LayerConfig, memory: VirtualTensor, prefix: str
) -> Rows:
    """Project encoder output [S, H] to keys and values, side by side [S, ...]."""
    rows = builder.round(memory, prefix + "memory_clip")
    return project_heads(builder, config, rows, prefix + "key_value", 2)


def attention(
    builder: LayerBuilder,
    config: LayerConfig,
    queries: Rows,
    cu_seqlens: VirtualTensor,
    memory: Memory,
    prefix: str,
    *,
    causal: bool = False,
    window: int | None = None,
    bias: PositionBias | None = None,
) -> VirtualTensor:
    """Attend from `queries`, the first columns of their rows, and project: floats [M, H]."""
    hidden, columns, rows = config.hidden, config.query_columns, queries.tensor.shape[0]
    context = builder.result(prefix + "context", (rows, columns), prefix + "context_clip")
    heads = Heads(
        q=Projected(rows=queries, column=0),
        k=Projected(rows=memory.rows, column=memory.key_column),
        v=Projected(rows=memory.rows, column=memory.key_column + config.key_columns),
        cu_seqlens=cu_seqlens,
        key_cu_seqlens=memory.cu_seqlens,
        count=config.heads,
        group=config.heads // config.of_keys,
        width=config.head_columns,
        causal=causal,
        window=window or 0,
        bias=bias,
        softmax_scale=config.softmax_scale or 0.0,
        dropout=builder.dropout(config.attention_dropout),
    )
    log_sum = builder.tensor(prefix + "log_sum", (rows, config.heads)) if builder.backward else None
    builder.add(Attention(heads=heads, out=context.out, rounded=context.rounded, log_sum=log_sum))
    return builder.project(
        context.rows,
        prefix + "out_weight",
        (hidden, columns),
        Epilogue(name=prefix + "out"),
        bias=bias_of(config, prefix + "out"),
        bound=xavier(columns, hidden),
        in_out=config.in_out,
    ).floats


def self_attention(
    builder: LayerBuilder,
    config: LayerConfig,
    x: Rows,
    cu_seqlens: VirtualTensor,
    prefix: str,
    *,
    causal: bool,
    qkv: Rows | None = None,
) -> VirtualTensor:
    """Attend within sentences, from x or `qkv`; ValueError for a window without `causal`."""
    if config.window is not None and not causal:
        raise ValueError(
            f"window is {config.window}, but only causal self-attention has one: leave it out"
        )
    qkv = qkv or project_heads(builder, config, x, prefix + "qkv", 3)
    memory = Memory(rows=qkv, key_column=config.query_columns, cu_seqlens=cu_seqlens)
    bias = position_bias(builder, config, prefix)
    options = {"causal": causal, "window": config.window, "bias": bias}
    return attention(builder, config, qkv, cu_seqlens, memory, prefix, **options)


def cross_attention(
    builder: LayerBuilder,
    config: LayerConfig,
    x: Rows,
    cu_seqlens: VirtualTensor,
    memory: Memory,
    prefix: str,
) -> VirtualTensor:
    """Project x to queries and attend to encoder output: floats [M, H]."""
    queries = project_heads(builder, config, x, prefix + "query", 1)
    return attention(builder, config, queries, cu_seqlens, memory, prefix)


def feed_forward(builder: LayerBuilder, config: LayerConfig, x: Rows, prefix: str) -> VirtualTensor:
    """Two projections around an activation, or three with a gate: rows -> floats [M, H]."""

    def projected(x: Rows, name: str, outputs: int, end: Epilogue, **options) -> Rows:
        inputs, name = x.tensor.shape[1], prefix + name
        bound = fan_in(inputs)
        options |= {"bias": bias_of(config, name), "bias_bound": bound, "bound": bound}
        shape = outputs, inputs
        return builder.project(x, name + "_weight", shape, end, in_out=config.in_out, **options)

    inner, name = config.feed_forward, prefix + "activation"
    activation = Activation[config.activation]
    if config.gated:
        gate, up = (
            projected(
                x,
                side,
                inner,
                Epilogue(name=prefix + side, clip=f"{prefix}{side}_clip"),
                accumulates=side == "up",
            )
            for side in ("gate", "up")
        )
        middle = builder.result(name, (x.tensor.shape[0], inner), name + "_clip", by_row=True)
        builder.add(
            Gated(
                gate=gate,
                up=up,
                activation=activation,
                dropout=builder.dropout(config.activation_dropout),
                out=middle.out,
                rounded=middle.rounded,
            )
        )
        middle = middle.rows
    else:
        end = Epilogue(
            name=name,
            clip=name + "_clip",
            activation=activation,
            dropout=config.activation_dropout,
        )
        middle = projected(x, "fc1", inner, end)
    return projected(middle, "fc2", config.hidden, Epilogue(name=prefix + "fc2")).floats


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The float tensor to which a block adds, and the rows that it reads."""

    floats: VirtualTensor | None
    rows: Rows


def residual_sum(
    builder: LayerBuilder,
    config: LayerConfig,
    residual: VirtualTensor,
    update: VirtualTensor | None,
    name: str,
    *,
    kept: bool = True,
) -> ResidualSum:
    """Return residual + dropout(update), stored if `kept`; without an update, the residual."""
    if update is None:
        return ResidualSum(residual=residual)
    z = builder.like(name, residual) if kept else None
    return ResidualSum(
        residual=residual, update=update, dropout=builder.dropout(config.dropout), z=z
    )


def norm(
    builder: LayerBuilder,
    config: LayerConfig,
    residual: VirtualTensor,
    update: VirtualTensor | None,
    *,
    name: str,
    clip: str | None,
    keep_float: bool,
) -> Residual:
    """Normalise residual + dropout(update): rows, and floats if `keep_float`, else the sum."""
    rows, columns = shape = residual.shape
    # under pre-norm the next sum reads z, and so does a gradient that reads no codes
    kept = config.pre_norm or builder.backward and not builder.keeps_codes
    fields = {
        "sum": residual_sum(builder, config, residual, update, name + ".sum", kept=kept),
        "weight": builder.parameter(name + ".weight", (columns,), Kind.NORM_WEIGHT, start=1.0),
        "epsilon": config.layer_norm_epsilon,
        "rstd": builder.tensor(name + ".rstd", (rows,)),
    }
    if config.norm == "layer":
        fields["bias"] = builder.parameter(name + ".bias", (columns,), Kind.NORM_BIAS)
        fields["mean"] = builder.tensor(name + ".mean", (rows,))
    if builder.keeps_codes:
        fields["normalised"] = NormalisedRows(
            format=NORMALISED,
            codes=builder.tensor(name + ".normalised", shape, NORMALISED.storage),
            scale=builder.tensor(name + ".normalised.scale", shape[:1]),
        )
    y = builder.result(name + ".out", shape, clip, floats=keep_float)
    added = builder.add(ResidualNorm(**fields, out=y.out, rounded=y.rounded))
    return Residual(floats=y.out if keep_float else added.sum.z, rows=y.rows)


def enter(
    builder: LayerBuilder, config: LayerConfig, x: VirtualTensor, name: str, clip: str
) -> Residual:
    """Round x for a layer's first block, under pre-norm after the norm `name`."""
    if not config.pre_norm:
        return Residual(floats=x, rows=builder.round(x, clip))
    normed = norm(builder, config, x, None, name=name, clip=clip, keep_float=False)
    return Residual(floats=x, rows=normed.rows)


def between(
    builder: LayerBuilder,
    config: LayerConfig,
    before: Residual,
    update: VirtualTensor,
    *,
    own: str,
    following: str,
    clip: str,
) -> Residual:
    """Add a block's result; apply its `own` norm (post-norm) or the `following` one (pre-norm)."""
    name, post = following if config.pre_norm else own, not config.pre_norm
    return norm(builder, config, before.floats, update, name=name, clip=clip, keep_float=post)


def leave(
    builder: LayerBuilder, config: LayerConfig, before: Residual, update: VirtualTensor, own: str
) -> VirtualTensor:
    """Add the last block's result, under post-norm normalise: the layer's result [M, H]."""
    if not config.pre_norm:
        return norm(
            builder, config, before.floats, update, name=own, clip=None, keep_float=True
        ).floats
    added = residual_sum(builder, config, before.floats, update, own + ".sum")
    return builder.add(ResidualNorm(sum=added)).sum.z


def append(builder: LayerBuilder, before: VirtualTensor, now: Rows, batch: int) -> Rows:
    """Append one row to each sentence, [B * P, W] -> [B * (P + 1), W]; has no gradient."""
    new = now.tensor
    out = builder.tensor(new.name + ".all", (before.shape[0] + batch, new.shape[1]), before.dtype)
    if now.coded is None:
        builder.add(Append(before_floats=before, now_floats=new, batch=batch, out_floats=out))
    else:
        builder.add(Append(before=before, now=new, batch=batch, out=out))
    return builder.kept_rows(out, now.coded and now.scale)
