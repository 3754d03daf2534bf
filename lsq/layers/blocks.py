"""Layers as forward operations.

Each block appends to a Builder and declares its parameters; gradients follow.

Names of parameters are relative to `prefix`, as in a module's state dict. M rows, H hidden, F
feed-forward. In float mode nothing is rounded or has a clip.
"""

import math
from dataclasses import dataclass

import torch

from lsq.config import Adapter, LayerConfig
from lsq.layers.decoded import decode, grouped
from lsq.layers.positions import position_bias, turn_heads
from lsq.ops.adapter import Adapt, AdapterInput
from lsq.ops.append import Append
from lsq.ops.attention import Attention
from lsq.ops.heads import Heads, PositionBias, Projected
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.prediction import KeptWords, Prediction
from lsq.ops.project import Project
from lsq.ops.residual_norm import NormalisedRows, ResidualNorm
from lsq.ops.residual_sum import ResidualSum
from lsq.ops.rounding import Round, unpacked
from lsq.ops.vocabulary_loss import VocabularyLoss
from lsq.program.builder import Builder
from lsq.program.parameters import Kind, fan_in, xavier
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Rows
from lsq.quant import NORMALISED


def filled(rows: int) -> int:
    """At least so many, one of four numbers between two powers of two."""
    step = max(16, 2 ** (max(rows - 1, 1).bit_length() - 3))
    return -(-rows // step) * step


@dataclass(frozen=True, kw_only=True)
class PackedSequences:
    """Sizes of a batch of sentences that lie packed in rows, one after another."""

    rows: int
    """M, all tokens."""
    count: int
    """B"""

    def filled(self) -> "PackedSequences":
        """At least as large, of few sizes: four numbers of rows between two powers of two, and with
        each of them one number of sentences as long as they have 16 tokens or more on average,
        twice as many from 8 on, ...
        """
        rows = filled(self.rows)
        count = -(-rows // 16)
        while count < self.count:
            count *= 2
        return PackedSequences(rows=rows, count=count)

    def cu_seqlens(self, builder: Builder, name: str) -> VirtualTensor:
        """The input int32 [B + 1] that says where each sentence begins."""
        return builder.input(name, (self.count + 1,), torch.int32)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is attended to: keys, and values behind them, in one tensor [S, ...]."""

    rows: Rows
    key_column: int
    cu_seqlens: VirtualTensor


def quantize(builder: Builder, x: VirtualTensor, clip: str) -> Rows:
    """Round x [M, N] under the clip of that name; x itself where activations are not rounded."""
    if not builder.quant.coded:
        return decode(builder, Rows(floats=x), clip)
    rounded = builder.coded(clip.removesuffix("_clip"), x.shape, clip)
    builder.add(Round(x=x, rounded=rounded))
    return Rows(coded=rounded)


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """How a product ends: what happens to its sums before they are stored."""

    name: str
    """Of the result."""
    clip: str | None = None
    """Rounded under the clip of this name, if anything is; else floats."""
    activation: Activation = Activation.none
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    """Of floats; on a GPU they have that of its activations."""

    def rows(self, builder: Builder, shape: tuple[int, int]) -> Rows:
        """Where a result [M, N] with this end goes, before it is decoded."""
        if self.clip and builder.quant.coded:
            return Rows(coded=builder.coded(self.name, shape, self.clip))
        return Rows(floats=builder.tensor(self.name, shape, self.dtype))

    def nonlinearity(self, builder: Builder, shape: tuple[int, int]) -> Nonlinearity | None:
        """What the builder's mode wants of activation and dropout, if anything."""
        found = Nonlinearity(activation=self.activation, dropout=builder.dropout(self.dropout))
        if builder.backward and self.activation is Activation.relu:
            found.positive = builder.tensor(
                self.name + ".positive", (-(-math.prod(shape) // 8),), torch.uint8
            )
        elif builder.backward and self.activation.bounded_slope and builder.quant.coded:
            found.slope = builder.tensor(self.name + ".slope", shape, torch.int8)
        elif builder.backward and self.activation is not Activation.none:
            found.before = builder.tensor(self.name + ".before", shape)
        return None if found.activation is Activation.none and found.dropout is None else found


def project(
    builder: Builder,
    x: Rows,
    weight: str,
    shape,
    end: Epilogue,
    *,
    bias: str | None = None,
    rows: int | None = None,
    joins: bool = False,
    **start,
) -> Rows:
    """x [M, K] times a weight of `shape` [N, K], transposed, with its bias [N] and its end.

    `rows` above N pads the weight's codes and so the columns of the result. start: see
    builder.weight; a bias begins at 0, or as the weight does where that has `bias_bound`. `joins`:
    x has a product before this one.
    """
    bias_bound = start.pop("bias_bound", 0.0)
    groups = grouped(builder, x, weight)
    stored = builder.weight(
        weight, shape, rows=rows, group=0 if groups is None else groups.group, **start
    )
    groups = groups if groups is not None and stored.group == groups.group else None
    w = unpacked(builder, stored, x.tensor.shape[0])
    added = builder.parameter(bias, shape[:1], Kind.BIAS, bound=bias_bound) if bias else None
    adapter, size = builder.adapters.get(weight), (x.tensor.shape[0], rows or shape[0])
    own = end if adapter is None else Epilogue(name=end.name + ".base")
    y, nonlinearity = own.rows(builder, size), own.nonlinearity(builder, size)
    builder.add(
        Project(
            x=x,
            weight=w,
            groups=groups,
            bias=added,
            out=y.floats,
            rounded=y.coded,
            nonlinearity=nonlinearity,
            joins=joins,
        )
    )
    if adapter is not None:
        y = adapt(builder, x, y.floats, adapter, end)
    return decode(builder, y, end.clip)


def adapt(builder: Builder, x: Rows, base: VirtualTensor, adapter: Adapter, end: Epilogue) -> Rows:
    """Add adapters of x to its product `base` [M, N], before `end`: a result that is not decoded
    yet."""
    name, (rows, inputs) = adapter.weight.removesuffix("weight") + "adapter", x.tensor.shape
    rank, dropout = adapter.rank, builder.dropout(adapter.dropout)
    values = builder.tensor(name + ".input", x.tensor.shape)
    builder.add(AdapterInput(x=x, dropout=dropout, values=values))
    y = end.rows(builder, base.shape)
    builder.add(
        Adapt(
            x=x,
            dropout=dropout,
            values=values,
            base=base,
            out=y.floats,
            rounded=y.coded,
            nonlinearity=end.nonlinearity(builder, base.shape),
            down=builder.parameter(name + "_down", (rank, inputs), Kind.ADAPTER),
            up=builder.parameter(name + "_up", (base.shape[1], rank), Kind.ADAPTER),
            hidden=builder.tensor(name + ".hidden", (rows, rank)),
        )
    )
    return y


def bias_of(config: LayerConfig, name: str) -> str | None:
    """The name of a projection's bias, if projections have one."""
    return name + "_bias" if config.bias else None


def project_heads(builder: Builder, config: LayerConfig, x: Rows, name: str, parts: int) -> Rows:
    """Queries (parts 1), keys and values (2) or all three (3) side by side; `name`: of the result
    and its parameters.

    All three are those of self-attention, in which queries and keys may turn.
    """
    hidden, turns = config.hidden, parts == 3 and config.rotary is not None
    columns = parts % 2 * config.query_columns + parts // 2 * 2 * config.key_columns
    heads = project(
        builder,
        x,
        name + "_weight",
        (columns, hidden),
        Epilogue(name=name + ".unturned") if turns else Epilogue(name=name, clip=name + "_clip"),
        bias=name + "_bias" if config.biased_heads else None,
        bound=xavier(hidden, hidden) / math.sqrt(2),
        bias_bound=fan_in(hidden),
        in_out=config.in_out,
    )
    if not turns:
        return heads
    end = Epilogue(name=name, clip=name + "_clip")
    turned = end.rows(builder, heads.floats.shape)
    return decode(
        builder,
        turn_heads(builder, config, heads.floats, turned, name.removesuffix("qkv")),
        end.clip,
    )


def project_memory(
    builder: Builder, config: LayerConfig, memory: VirtualTensor, prefix: str
) -> Rows:
    """Keys and values side by side [S, ...]."""
    return project_heads(
        builder, config, quantize(builder, memory, prefix + "memory_clip"), prefix + "key_value", 2
    )


def attention(
    builder: Builder,
    config: LayerConfig,
    queries: Rows,
    cu_seqlens: VirtualTensor,
    memory: Memory,
    prefix: str,
    *,
    causal: bool,
    window: int | None = None,
    bias: PositionBias | None = None,
) -> VirtualTensor:
    """Attention of rows that begin with queries, and its output projection: floats [M, H], before
    dropout."""
    hidden, columns, rows = config.hidden, config.query_columns, queries.tensor.shape[0]
    end = Epilogue(name=prefix + "context", clip=prefix + "context_clip")
    context = end.rows(builder, (rows, columns))
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
        share=config.softmax_scale or 0.0,
        dropout=builder.dropout(config.attention_dropout),
    )
    log_sum = builder.tensor(prefix + "log_sum", (rows, config.heads)) if builder.backward else None
    builder.add(Attention(heads=heads, out=context.floats, rounded=context.coded, log_sum=log_sum))
    return project(
        builder,
        decode(builder, context, end.clip),
        prefix + "out_weight",
        (hidden, columns),
        Epilogue(name=prefix + "out"),
        bias=bias_of(config, prefix + "out"),
        bound=xavier(columns, hidden),
        in_out=config.in_out,
    ).floats


def self_attention(
    builder: Builder,
    config: LayerConfig,
    x: Rows,
    cu_seqlens: VirtualTensor,
    prefix: str,
    *,
    causal: bool,
    qkv: Rows | None = None,
) -> VirtualTensor:
    """Attention of packed sentences to themselves: normalised rows -> as `attention`.

    `qkv`: what x is projected to, if that is there already.

    Raises:
        ValueError: the configuration has a window, but attention is not causal.
    """
    if config.window is not None and not causal:
        raise ValueError(
            f"window is {config.window}, but only causal self-attention has one: leave it out"
        )
    qkv = qkv or project_heads(builder, config, x, prefix + "qkv", 3)
    memory = Memory(rows=qkv, key_column=config.query_columns, cu_seqlens=cu_seqlens)
    bias = position_bias(builder, config, prefix)
    return attention(
        builder,
        config,
        qkv,
        cu_seqlens,
        memory,
        prefix,
        causal=causal,
        window=config.window,
        bias=bias,
    )


def cross_attention(
    builder: Builder,
    config: LayerConfig,
    x: Rows,
    cu_seqlens: VirtualTensor,
    memory: Memory,
    prefix: str,
) -> VirtualTensor:
    """Attention to a memory: normalised rows -> as `attention`."""
    queries = project_heads(builder, config, x, prefix + "query", 1)
    return attention(builder, config, queries, cu_seqlens, memory, prefix, causal=False)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What goes from block to block: the float tensor to add to, and what the next block reads."""

    floats: VirtualTensor
    rows: Rows

    @staticmethod
    def of(builder: Builder, floats: VirtualTensor, normed: ResidualNorm, clip: str) -> "Residual":
        """The next block reads what was normed."""
        rounded = normed.rounded
        rows = (
            decode(builder, Rows(floats=normed.out), clip)
            if rounded is None
            else Rows(coded=rounded)
        )
        return Residual(floats=floats, rows=rows)


def residual_sum(
    builder: Builder,
    config: LayerConfig,
    residual: VirtualTensor,
    update: VirtualTensor | None,
    name: str,
    *,
    kept: bool = True,
) -> ResidualSum:
    """residual + dropout(update), kept under that name if it is; the residual itself without an
    update."""
    if update is None:
        return ResidualSum(residual=residual)
    z = builder.like(name, residual) if kept else None
    return ResidualSum(
        residual=residual, update=update, dropout=builder.dropout(config.dropout), z=z
    )


def norm(
    builder: Builder,
    config: LayerConfig,
    residual: VirtualTensor,
    update: VirtualTensor | None,
    *,
    name: str,
    clip: str | None,
    keep_float: bool,
) -> ResidualNorm:
    """residual + dropout(update), and its norm `name`: as codes under `clip`, as floats, or
    both."""
    rows, columns = residual.shape
    coded = builder.quant.coded
    rounds, keeps_codes = clip is not None and coded, builder.backward and coded
    # the next sum begins with z, or a gradient reads it
    kept = config.pre_norm or builder.backward and not keeps_codes
    fields = {
        "sum": residual_sum(builder, config, residual, update, name + ".sum", kept=kept),
        "weight": builder.parameter(name + ".weight", (columns,), Kind.NORM_WEIGHT, start=1.0),
        "epsilon": config.layer_norm_epsilon,
        "rstd": builder.tensor(name + ".rstd", (rows,)),
    }
    if config.norm == "layer":
        fields["bias"] = builder.parameter(name + ".bias", (columns,), Kind.NORM_BIAS)
        fields["mean"] = builder.tensor(name + ".mean", (rows,))
    if keeps_codes:
        codes = builder.tensor(name + ".normalised", residual.shape, NORMALISED.storage)
        scale = builder.tensor(name + ".normalised.scale", (rows,))
        fields["normalised"] = NormalisedRows(format=NORMALISED, codes=codes, scale=scale)
    fields["out"] = (
        builder.tensor(name + ".out", residual.shape) if keep_float or not rounds else None
    )
    fields["rounded"] = (
        builder.coded(clip.removesuffix("_clip"), residual.shape, clip) if rounds else None
    )
    return builder.add(ResidualNorm(**fields))


def enter(
    builder: Builder, config: LayerConfig, x: VirtualTensor, name: str, clip: str
) -> Residual:
    """What the first block of a layer reads: the norm `name` of x under pre-norm, else x,
    rounded."""
    if not config.pre_norm:
        return Residual(floats=x, rows=quantize(builder, x, clip))
    return Residual.of(
        builder, x, norm(builder, config, x, None, name=name, clip=clip, keep_float=False), clip
    )


def between(
    builder: Builder,
    config: LayerConfig,
    before: Residual,
    update: VirtualTensor,
    *,
    own: str,
    following: str,
    clip: str,
) -> Residual:
    """Dropout and residual of one block, then the norm: its own (post-norm) or the following
    block's (pre-norm)."""
    normed = norm(
        builder,
        config,
        before.floats,
        update,
        name=following if config.pre_norm else own,
        clip=clip,
        keep_float=not config.pre_norm,
    )
    return Residual.of(builder, normed.sum.z if config.pre_norm else normed.out, normed, clip)


def leave(
    builder: Builder, config: LayerConfig, before: Residual, update: VirtualTensor, own: str
) -> VirtualTensor:
    """Dropout and residual of the last block, and its own norm under post-norm: the layer's result
    [M, H]."""
    if not config.pre_norm:
        return norm(
            builder, config, before.floats, update, name=own, clip=None, keep_float=True
        ).out
    added = residual_sum(builder, config, before.floats, update, own + ".sum")
    return builder.add(ResidualNorm(sum=added)).sum.z


def stored(builder: Builder, tensor: VirtualTensor, scale: VirtualTensor | None) -> Rows:
    """Rows that an earlier program wrote: codes under a scale, or floats where there are none."""
    if not builder.quant.coded:
        return Rows(floats=tensor)
    return Rows(coded=Coded(format=builder.quant.activations, codes=tensor, scale=scale))


def append(builder: Builder, before: VirtualTensor, now: Rows, batch: int) -> Rows:
    """Rows [B * P, W] of sentences, with one more for each; for decoding, without a gradient."""
    new = now.tensor
    out = builder.tensor(new.name + ".all", (before.shape[0] + batch, new.shape[1]), before.dtype)
    if now.coded is None:
        builder.add(Append(before_floats=before, now_floats=new, batch=batch, out_floats=out))
    else:
        builder.add(Append(before=before, now=new, batch=batch, out=out))
    return stored(builder, out, now.coded and now.scale)


def vocabulary_loss(
    builder: Builder, prediction: Prediction
) -> tuple[VirtualTensor, VirtualTensor]:
    """Vocabulary projection and label-smoothed cross-entropy in one: -> (loss [1], nll loss
    [1])."""
    loss, nll = builder.tensor("loss", (1,)), builder.tensor("nll_loss", (1,))
    normaliser = bound = kept = None
    rows = (prediction.rows,)
    if builder.backward:
        normaliser = builder.tensor("log_normaliser", rows)
        if prediction.x.coded is not None and builder.quant.backward == "int8":
            bound = builder.tensor("d_logits.bound", rows)
            if not builder.needs_gradient(prediction.weight.clip):
                kept = KeptWords(
                    likeliest=builder.tensor("d_logits.likeliest", rows, torch.int64),
                    gradient=builder.tensor("d_logits.kept", (2, *rows)),
                )
    builder.add(
        VocabularyLoss(
            prediction=prediction, loss=loss, nll=nll, normaliser=normaliser, bound=bound, kept=kept
        )
    )
    return loss, nll
