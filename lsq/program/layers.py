"""Programs of whole layers, built once per configuration and shape.

Rows are time-major: row t * B + b. Names of parameters are those of the modules in lsq.layers.
"""

from functools import lru_cache, wraps

import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.gemm import lookup
from lsq.program import blocks
from lsq.program.builder import Builder
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor

PROGRAMS_KEPT = 512
"""Programs of the shapes seen last that are kept, for each kind of layer."""


def cached(build):
    """Keep what `build` returned for the arguments seen last, as long as the same files of tuned products are used.

    Those decide how much scratch memory operations take.
    """
    kept = lru_cache(maxsize=PROGRAMS_KEPT)(lambda generation, *arguments, **named: build(*arguments, **named))

    @wraps(build)
    def program(*arguments, **named) -> Program:
        return kept(lookup.generation(), *arguments, **named)

    return program


@cached
def linear(quant: QuantConfig, rows: int, inputs: int, outputs: int, bias: bool, training: bool, backward: bool):
    """A projection by itself: x [M, K] -> y [M, N], float32, with int32 sums inside."""
    b = Builder("linear", quant, training=training, backward=backward)
    x = b.input("x", (rows, inputs))
    product = blocks.linear(b, blocks.quantize(b, x, "input_clip"), "weight", (outputs, inputs), clip=None, output="y")
    b.output(blocks.read(b, product, "bias" if bias else None))
    return b.build()


@cached
def self_attention(
    config: LayerConfig, batch: int, time: int, padding: bool, causal: bool, training: bool, backward: bool
) -> Program:
    """Multi-head self-attention by itself: x [T * B, H] -> [T * B, H]."""
    b = Builder("self_attention", config.quant, training=training, backward=backward)
    x = b.input("x", (time * batch, config.hidden))
    mask = _padding(b, "padding", batch, time, padding)
    rounded = blocks.quantize(b, x, "input_clip")
    q, k, v = _project_self(b, config, rounded, batch, "")
    context = blocks.attention(b, config, q, k, v, mask, prefix="", causal=causal)
    b.output(blocks.read(b, _project_out(b, config, context, ""), "out_bias"))
    return b.build()


@cached
def cross_attention(
    config: LayerConfig, batch: int, time: int, source: int, padding: bool, training: bool, backward: bool
) -> Program:
    """Multi-head attention over a memory by itself: x [T * B, H], memory [S * B, H] -> [T * B, H]."""
    b = Builder("cross_attention", config.quant, training=training, backward=backward)
    x = b.input("x", (time * batch, config.hidden))
    memory = b.input("memory", (source * batch, config.hidden))
    mask = _padding(b, "padding", batch, source, padding)
    q = _project_query(b, config, blocks.quantize(b, x, "input_clip"), batch, "")
    k, v = _project_memory(b, config, memory, batch, "")
    context = blocks.attention(b, config, q, k, v, mask, prefix="", causal=False)
    b.output(blocks.read(b, _project_out(b, config, context, ""), "out_bias"))
    return b.build()


@cached
def feed_forward(config: LayerConfig, rows: int, training: bool, backward: bool) -> Program:
    """The feed-forward block by itself: x [M, H] -> [M, H]."""
    b = Builder("feed_forward", config.quant, training=training, backward=backward)
    x = b.input("x", (rows, config.hidden))
    product = _feed_forward(b, config, blocks.quantize(b, x, "input_clip"), "")
    b.output(blocks.read(b, product, "fc2_bias"))
    return b.build()


@cached
def encoder_layer(
    config: LayerConfig, batch: int, time: int, padding: bool, training: bool, backward: bool
) -> Program:
    """x [T * B, H] and padding bool [B, T] -> [T * B, H]."""
    b = Builder("encoder_layer", config.quant, training=training, backward=backward)
    x = b.input("x", (time * batch, config.hidden))
    mask = _padding(b, "padding", batch, time, padding)
    state = _enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    q, k, v = _project_self(b, config, state.rounded, batch, "self_attn.")
    context = blocks.attention(b, config, q, k, v, mask, prefix="self_attn.", causal=False)
    product = _project_out(b, config, context, "self_attn.")
    _finish_with_feed_forward(b, config, product, "self_attn", state)
    return b.build()


@cached
def decoder_layer(
    config: LayerConfig, batch: int, time: int, source: int, padding: bool, self_padding: bool, training: bool,
    backward: bool,
) -> Program:
    """x [T * B, H], memory [S * B, H], padding bool [B, S] and self_padding bool [B, T] -> [T * B, H]."""
    b = Builder("decoder_layer", config.quant, training=training, backward=backward)
    x = b.input("x", (time * batch, config.hidden))
    memory = b.input("memory", (source * batch, config.hidden))
    mask = _padding(b, "padding", batch, source, padding)
    self_mask = _padding(b, "self_padding", batch, time, self_padding)
    state = _enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    q, k, v = _project_self(b, config, state.rounded, batch, "self_attn.")
    context = blocks.attention(b, config, q, k, v, self_mask, prefix="self_attn.", causal=True)
    product = _project_out(b, config, context, "self_attn.")
    state = _between(
        b, config, product, "self_attn", state, "self_attn_layer_norm", "encoder_attn_layer_norm",
        "encoder_attn.input_clip",
    )
    q = _project_query(b, config, state.rounded, batch, "encoder_attn.")
    k, v = _project_memory(b, config, memory, batch, "encoder_attn.")
    context = blocks.attention(b, config, q, k, v, mask, prefix="encoder_attn.", causal=False)
    product = _project_out(b, config, context, "encoder_attn.")
    _finish_with_feed_forward(b, config, product, "encoder_attn", state)
    return b.build()


@cached
def decoder_memory(config: LayerConfig, batch: int, source: int) -> Program:
    """Keys and values of the cross-attention for decoding: memory [S * B, H] -> two [B, N, S, D]."""
    b = Builder("decoder_memory", config.quant, training=False, backward=False)
    memory = b.input("memory", (source * batch, config.hidden))
    for tensor in _project_memory(b, config, memory, batch, "encoder_attn."):
        b.output(tensor)
    return b.build()


@cached
def decoder_step(config: LayerConfig, batch: int, past: int, source: int, padding: bool) -> Program:
    """One step of incremental decoding: x [B, H] with the keys and values of `past` steps -> x, keys, values."""
    b = Builder("decoder_step", config.quant, training=False, backward=False)
    width = config.hidden // config.heads
    x = b.input("x", (batch, config.hidden))
    old = [b.input(name, (batch, config.heads, past, width)) for name in ("key", "value")]
    k_memory, v_memory = (
        b.input(name, (batch, config.heads, source, width)) for name in ("cross_key", "cross_value")
    )
    mask = _padding(b, "padding", batch, source, padding)
    state = _enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    q, *new = _project_self(b, config, state.rounded, batch, "self_attn.")
    k, v = (blocks.append_time(b, before, now) for before, now in zip(old, new, strict=True))
    context = blocks.attention(b, config, q, k, v, None, prefix="self_attn.", causal=False)
    product = _project_out(b, config, context, "self_attn.")
    state = _between(
        b, config, product, "self_attn", state, "self_attn_layer_norm", "encoder_attn_layer_norm",
        "encoder_attn.input_clip",
    )
    q = _project_query(b, config, state.rounded, batch, "encoder_attn.")
    context = blocks.attention(b, config, q, k_memory, v_memory, mask, prefix="encoder_attn.", causal=False)
    product = _project_out(b, config, context, "encoder_attn.")
    _finish_with_feed_forward(b, config, product, "encoder_attn", state)
    b.output(k)
    b.output(v)
    return b.build()


@cached
def vocabulary_logits(
    quant: QuantConfig, count: int, hidden: int, vocabulary: int, rows: int, training: bool, backward: bool
) -> Program:
    """x [M, H] -> logits [M, rows], where rows is the padded vocabulary."""
    b = Builder("vocabulary_logits", quant, training=training, backward=backward)
    x = b.input("x", (count, hidden))
    product = blocks.linear(
        b, blocks.quantize(b, x, "input_clip"), "weight", (vocabulary, hidden), clip=None, output="logits", rows=rows
    )
    b.output(blocks.read(b, product, None))
    return b.build()


@cached
def vocabulary_loss(
    quant: QuantConfig, count: int, hidden: int, vocabulary: int, rows: int, padding: int, smoothing: float,
    training: bool, backward: bool,
) -> Program:
    """x [M, H], target int64 [M] -> (loss [1], nll_loss [1]), summed over targets other than `padding`."""
    b = Builder("vocabulary_loss", quant, training=training, backward=backward)
    x = b.input("x", (count, hidden))
    target = b.input("target", (count,), torch.int64)
    losses = blocks.cross_entropy(
        b, blocks.quantize(b, x, "input_clip"), "weight", (vocabulary, hidden), target, rows=rows, padding=padding,
        smoothing=smoothing,
    )
    for loss in losses:
        b.output(loss)
    return b.build()


@cached
def embedding(
    config: QuantConfig, batch: int, time: int, vocabulary: int, hidden: int, positions: int, padding: int,
    scale: float, dropout: float, learned: bool, training: bool, backward: bool,
) -> Program:
    """tokens int64 [B, T], places int64 [B, T] -> x [T * B, H] = dropout(scale * weight[token] + position[place])."""
    b = Builder("embedding", config, training=training, backward=backward)
    tokens, places = (b.input(name, (batch, time), torch.int64) for name in ("tokens", "places"))
    weight = b.parameter("weight", (vocabulary, hidden))
    table = (b.parameter if learned else b.input)("position_weight", (positions, hidden))
    x = b.temporary("x", (time * batch, hidden))
    b.emit(
        "embedding", (tokens, places, weight, table, b.key), (x,), scale=scale, padding=padding,
        dropout=dropout if training else 0.0, stream=b.next_stream(), learned=learned,
    )
    b.output(x)
    return b.build()


class _Stream:
    """The residual stream between two blocks: the float tensor to add to, and what the next block reads."""

    def __init__(self, residual: VirtualTensor, rounded):
        self.residual = residual
        self.rounded = rounded


def _padding(b: Builder, name: str, batch: int, time: int, wanted: bool) -> VirtualTensor | None:
    return b.input(name, (batch, time), torch.bool) if wanted else None


def _enter(b, config, x, norm, clip) -> _Stream:
    if not config.pre_norm:
        return _Stream(x, blocks.quantize(b, x, clip))
    _, out, rounded = blocks.residual_norm(
        b, config, None, None, x, norm=norm, clip=clip, name=norm, keep_float=False
    )
    return _Stream(x, rounded or out)


def _between(b, config, product, block, state, own_norm, next_norm, clip) -> _Stream:
    """Bias, dropout and residual of one block, then the norm: its own (post-norm) or the next block's (pre-norm)."""
    norm = next_norm if config.pre_norm else own_norm
    z, out, rounded = blocks.residual_norm(
        b, config, product, f"{block}.out_bias", state.residual, norm=norm, clip=clip, name=block,
        keep_float=not config.pre_norm,
    )
    return _Stream(z if config.pre_norm else out, rounded or out)


def _finish_with_feed_forward(b, config, product, block, state) -> None:
    state = _between(
        b, config, product, block, state, f"{block}_layer_norm", "final_layer_norm", "feed_forward.input_clip"
    )
    product = _feed_forward(b, config, state.rounded, "feed_forward.")
    z, out, _ = blocks.residual_norm(
        b, config, product, "feed_forward.fc2_bias", state.residual,
        norm=None if config.pre_norm else "final_layer_norm", clip=None, name="feed_forward", keep_float=True,
    )
    b.output(z if config.pre_norm else out)


def _project_self(b, config, rounded, batch, prefix):
    hidden = config.hidden
    product = blocks.linear(
        b, rounded, prefix + "qkv_weight", (3 * hidden, hidden), clip=prefix + "qkv_clip", output=prefix + "qkv"
    )
    names = [prefix + name for name in ("query", "key", "value")]
    return blocks.split_heads(
        b, product, prefix + "qkv_bias", names, batch=batch, heads=config.heads, scale_first=True
    )


def _project_query(b, config, rounded, batch, prefix):
    product = blocks.linear(
        b, rounded, prefix + "query_weight", (config.hidden, config.hidden), clip=prefix + "query_clip",
        output=prefix + "query_product",
    )
    (query,) = blocks.split_heads(
        b, product, prefix + "query_bias", [prefix + "query"], batch=batch, heads=config.heads, scale_first=True
    )
    return query


def _project_memory(b, config, memory, batch, prefix):
    hidden = config.hidden
    product = blocks.linear(
        b, blocks.quantize(b, memory, prefix + "memory_clip"), prefix + "key_value_weight", (2 * hidden, hidden),
        clip=prefix + "key_value_clip", output=prefix + "key_value",
    )
    names = [prefix + "key", prefix + "value"]
    return blocks.split_heads(
        b, product, prefix + "key_value_bias", names, batch=batch, heads=config.heads, scale_first=False
    )


def _project_out(b, config, context, prefix):
    return blocks.linear(
        b, context, prefix + "out_weight", (config.hidden, config.hidden), clip=prefix + "out_clip",
        output=prefix + "out",
    )


def _feed_forward(b, config, rounded, prefix):
    hidden, inner = config.hidden, config.feed_forward
    product = blocks.linear(
        b, rounded, prefix + "fc1_weight", (inner, hidden), clip=prefix + "hidden_clip", output=prefix + "hidden"
    )
    activated = blocks.activation(b, config, product, prefix + "fc1_bias", prefix=prefix)
    return blocks.linear(b, activated, prefix + "fc2_weight", (hidden, inner), clip=None, output=prefix + "fc2")
