"""Layers as forward operations.

Each block appends to a LayerBuilder and declares its parameters; gradients follow. It says which
value is rounded under which clip; the builder knows the formats. Names of parameters are relative
to `prefix`, as in a module's state dict. M rows, H hidden, F feed-forward.
"""

import math
from dataclasses import dataclass

import torch

from lsq.config import Adapter, LayerConfig
from lsq.layers.builder import LayerBuilder, Result
from lsq.layers.positions import position_bias, rotate_heads
from lsq.ops.adapter import Adapt, AdapterInput
from lsq.ops.attention import Append, Attention, Heads, PositionBias, Projected
from lsq.ops.gated import Gated
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.vocabulary_loss import KeptWords, Prediction, VocabularyLoss
from lsq.program.parameters import Kind, fan_in, xavier
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Rows


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

    def cu_seqlens(self, builder: LayerBuilder, name: str) -> VirtualTensor:
        """The input int32 [B + 1] that says where each sentence begins."""
        return builder.input(name, (self.count + 1,), torch.int32)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Keys and, behind them, values, in one tensor [S, ...]."""

    rows: Rows
    key_column: int
    cu_seqlens: VirtualTensor


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The epilogue of a product: what happens to its sums before they are stored."""

    name: str
    """Name of the result."""
    clip: str | None = None
    """Rounded under the clip of this name, if anything is; else floats."""
    activation: Activation = Activation.none
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    """dtype of floats; on a GPU they have that of its activations."""

    def result(self, builder: LayerBuilder, shape: tuple[int, int]) -> Result:
        """Where a result [M, N] goes."""
        return builder.result(self.name, shape, self.clip, dtype=self.dtype)


def project(
    builder: LayerBuilder,
    x: Rows,
    weight: str,
    shape,
    end: Epilogue,
    *,
    bias: str | None = None,
    rows: int | None = None,
    accumulates: bool = False,
    **start,
) -> Rows:
    """x [M, K] times a weight of `shape` [N, K], transposed, with bias [N] and epilogue.

    Args:
        rows: above N pads the weight's codes and so the columns of the result.
        accumulates: the gradient of x goes into that of a product before this one, which reads x.
        start: see Builder.weight; a bias begins at 0, or within `bias_bound`.
    """
    bias_bound = start.pop("bias_bound", 0.0)
    operands = builder.operands(x, weight, shape, rows=rows, **start)
    added = builder.parameter(bias, shape[:1], Kind.BIAS, bound=bias_bound) if bias else None
    adapter, size = builder.adapters.get(weight), (x.tensor.shape[0], rows or shape[0])
    own = end if adapter is None else Epilogue(name=end.name + ".base")
    y = own.result(builder, size)
    builder.add(
        Project(
            **operands,
            bias=added,
            out=y.out,
            rounded=y.rounded,
            nonlinearity=builder.nonlinearity(own.name, size, own.activation, own.dropout),
            accumulates=accumulates,
        )
    )
    return y.rows if adapter is None else adapt(builder, x, y.out, adapter, end)


def adapt(
    builder: LayerBuilder, x: Rows, base: VirtualTensor, adapter: Adapter, end: Epilogue
) -> Rows:
    """Add adapters of x to its product `base` [M, N], before its epilogue."""
    name, (rows, inputs) = adapter.weight.removesuffix("weight") + "adapter", x.tensor.shape
    rank, dropout = adapter.rank, builder.dropout(adapter.dropout)
    values = builder.tensor(name + ".input", x.tensor.shape)
    builder.add(AdapterInput(x=x, dropout=dropout, values=values))
    y = end.result(builder, base.shape)
    builder.add(
        Adapt(
            x=x,
            dropout=dropout,
            values=values,
            base=base,
            out=y.out,
            rounded=y.rounded,
            nonlinearity=builder.nonlinearity(end.name, base.shape, end.activation, end.dropout),
            down=builder.parameter(name + "_down", (rank, inputs), Kind.ADAPTER),
            up=builder.parameter(name + "_up", (base.shape[1], rank), Kind.ADAPTER),
            hidden=builder.tensor(name + ".hidden", (rows, rank)),
        )
    )
    return y.rows


def bias_of(config: LayerConfig, name: str) -> str | None:
    """The name of a projection's bias, if projections have one."""
    return name + "_bias" if config.bias else None


def project_heads(
    builder: LayerBuilder, config: LayerConfig, x: Rows, name: str, parts: int
) -> Rows:
    """Queries (parts 1), keys and values (2) or all three (3) side by side.

    All three are those of self-attention, whose queries and keys may be rotated.

    Args:
        name: of the result and its parameters.
    """
    hidden, rotates = config.hidden, parts == 3 and config.rotary is not None
    columns = parts % 2 * config.query_columns + parts // 2 * 2 * config.key_columns
    heads = project(
        builder,
        x,
        name + "_weight",
        (columns, hidden),
        Epilogue(
            name=name + ".unrotated" if rotates else name, clip=None if rotates else name + "_clip"
        ),
        bias=name + "_bias" if config.biased_heads else None,
        bound=xavier(hidden, hidden) / math.sqrt(2),
        bias_bound=fan_in(hidden),
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
    """Keys and values side by side [S, ...]."""
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
    causal: bool,
    window: int | None = None,
    bias: PositionBias | None = None,
) -> VirtualTensor:
    """Attention of rows that begin with queries, and its output projection: floats [M, H], before
    dropout."""
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
    return project(
        builder,
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
    builder: LayerBuilder,
    config: LayerConfig,
    x: Rows,
    cu_seqlens: VirtualTensor,
    memory: Memory,
    prefix: str,
) -> VirtualTensor:
    """Attention to a memory: normalised rows -> as `attention`."""
    queries = project_heads(builder, config, x, prefix + "query", 1)
    return attention(builder, config, queries, cu_seqlens, memory, prefix, causal=False)


def feed_forward(builder: LayerBuilder, config: LayerConfig, x: Rows, prefix: str) -> VirtualTensor:
    """Two projections with an activation between them, or three with a gate: normalised rows ->
    floats [M, H], before dropout.
    """
    inner = config.feed_forward
    end = Epilogue(
        name=prefix + "activation",
        clip=prefix + "activation_clip",
        activation=Activation[config.activation],
        dropout=config.activation_dropout,
    )
    middle = (
        gated_middle(builder, config, x, prefix, end)
        if config.gated
        else project_feed_forward(builder, config, x, prefix + "fc1", inner, end)
    )
    fc2 = Epilogue(name=prefix + "fc2")
    return project_feed_forward(builder, config, middle, prefix + "fc2", config.hidden, fc2).floats


def gated_middle(
    builder: LayerBuilder, config: LayerConfig, x: Rows, prefix: str, end: Epilogue
) -> Rows:
    """dropout(activation(gate(x)) * up(x)) [M, F], with the activation, the dropout and the clip of
    `end`."""
    inner = config.feed_forward
    ends = (Epilogue(name=prefix + name, clip=f"{prefix}{name}_clip") for name in ("gate", "up"))
    gate, up = (
        project_feed_forward(builder, config, x, side.name, inner, side, accumulates=number > 0)
        for number, side in enumerate(ends)
    )
    result = builder.result(end.name, (x.tensor.shape[0], inner), end.clip, by_row=True)
    builder.add(
        Gated(
            gate=gate,
            up=up,
            activation=end.activation,
            dropout=builder.dropout(end.dropout),
            out=result.out,
            rounded=result.rounded,
        )
    )
    return result.rows


def project_feed_forward(
    builder: LayerBuilder,
    config: LayerConfig,
    x: Rows,
    name: str,
    outputs: int,
    end: Epilogue,
    **options,
) -> Rows:
    """A projection of a feed-forward block; `name`: of its parameters. options: see `project`."""
    inputs = x.tensor.shape[1]
    return project(
        builder,
        x,
        name + "_weight",
        (outputs, inputs),
        end,
        bias=bias_of(config, name),
        bound=fan_in(inputs),
        bias_bound=fan_in(inputs),
        in_out=config.in_out,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The float tensor to which a block adds, and the rows that it reads."""

    floats: VirtualTensor
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Normed:
    """A sum and its norm: z, floats of the norm if they are kept, and the norm as it is read."""

    z: VirtualTensor | None
    out: VirtualTensor | None
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
    """residual + dropout(update), kept under that name if it is; the residual itself without an
    update."""
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
) -> Normed:
    """residual + dropout(update), and its norm `name`: rounded under `clip`, as floats, or both."""
    rows, columns = shape = residual.shape
    # the next sum begins with z, or a gradient reads it
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
    fields["normalised"] = builder.normalised(name, shape)
    y = builder.result(name + ".out", shape, clip, floats=keep_float)
    added = builder.add(ResidualNorm(**fields, out=y.out, rounded=y.rounded))
    return Normed(z=added.sum.z, out=y.out, rows=y.rows)


def enter(
    builder: LayerBuilder, config: LayerConfig, x: VirtualTensor, name: str, clip: str
) -> Residual:
    """The input of a layer's first block: under pre-norm the norm `name` of x, else x, rounded."""
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
    """Dropout and residual of one block, then the norm: its own (post-norm) or the following
    block's (pre-norm)."""
    name = following if config.pre_norm else own
    normed = norm(
        builder, config, before.floats, update, name=name, clip=clip, keep_float=not config.pre_norm
    )
    return Residual(floats=normed.z if config.pre_norm else normed.out, rows=normed.rows)


def leave(
    builder: LayerBuilder, config: LayerConfig, before: Residual, update: VirtualTensor, own: str
) -> VirtualTensor:
    """Dropout and residual of the last block, and its own norm under post-norm: the layer's result
    [M, H]."""
    if not config.pre_norm:
        return norm(
            builder, config, before.floats, update, name=own, clip=None, keep_float=True
        ).out
    added = residual_sum(builder, config, before.floats, update, own + ".sum")
    return builder.add(ResidualNorm(sum=added)).sum.z


def append(builder: LayerBuilder, before: VirtualTensor, now: Rows, batch: int) -> Rows:
    """Rows [B * P, W] of sentences, with one more for each; for decoding, without a gradient."""
    new = now.tensor
    out = builder.tensor(new.name + ".all", (before.shape[0] + batch, new.shape[1]), before.dtype)
    if now.coded is None:
        builder.add(Append(before_floats=before, now_floats=new, batch=batch, out_floats=out))
    else:
        builder.add(Append(before=before, now=new, batch=batch, out=out))
    return builder.kept_rows(out, now.coded and now.scale)


def vocabulary_loss(
    builder: LayerBuilder, prediction: Prediction
) -> tuple[VirtualTensor, VirtualTensor]:
    """Vocabulary projection and label-smoothed cross-entropy in one: -> (loss [1], nll loss
    [1])."""
    loss, nll = builder.tensor("loss", (1,)), builder.tensor("nll_loss", (1,))
    normaliser = bound = kept = None
    rows = (prediction.rows,)
    if builder.backward:
        normaliser = builder.tensor("log_normaliser", rows)
        if builder.rounds_gradients:
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
