"""Programs of whole layers, built once per configuration and sizes.

Rows are packed: the tokens of a batch, sentence after sentence. Names of parameters are those of the modules.
"""

from dataclasses import dataclass
from functools import lru_cache, wraps

import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.gemm import lookup
from lsq.layers import blocks
from lsq.layers.blocks import End, Memory, Queries, Sentences, Stream
from lsq.ops.embedding import Embed
from lsq.ops.rounding import Add
from lsq.program.backend import Backend
from lsq.program.builder import Builder
from lsq.program.parameters import Kind
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor

PROGRAMS_KEPT = 512
"""Programs of the sizes seen last that are kept, for each kind of layer."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a program will run."""

    training: bool
    """Dropout is active."""
    backward: bool
    """There is a backward pass."""
    backend: Backend

    def builder(self, name: str, quant: QuantConfig) -> Builder:
        """An empty program of that name."""
        return Builder(
            name, quant, training=self.training, backward=self.backward, backend=self.backend,
            add=lambda a, b, out: Add(a=a, b=b, out=out),
        )


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
def linear(quant: QuantConfig, rows: int, inputs: int, outputs: int, mode: Mode, *, bias: bool) -> Program:
    """A projection by itself: x [M, K] -> y [M, N], float32."""
    b = mode.builder("linear", quant)
    x = blocks.quantize(b, b.input("x", (rows, inputs)), "input_clip")
    bound = blocks.fan_in(inputs)
    b.output(
        blocks.project(
            b, x, "weight", (outputs, inputs), End(name="y"), bias="bias" if bias else None, bound=bound,
            bias_bound=bound,
        )
    )
    return b.build()


@cached
def self_attention(config: LayerConfig, sentences: Sentences, mode: Mode, *, causal: bool) -> Program:
    """Multi-head self-attention by itself: x [M, H] -> [M, H]."""
    b = mode.builder("self_attention", config.quant)
    x, starts = _rows(b, "x", sentences, config)
    b.output(
        blocks.self_attention(
            b, config, blocks.quantize(b, x, "input_clip"), sentences, starts, "", causal=causal
        )
    )
    return b.build()


@cached
def cross_attention(config: LayerConfig, sentences: Sentences, source: Sentences, mode: Mode) -> Program:
    """Multi-head attention over a memory by itself: x [M, H], memory [S, H] -> [M, H]."""
    b = mode.builder("cross_attention", config.quant)
    x, starts = _rows(b, "x", sentences, config)
    memory = _project_memory(b, config, source, "")
    b.output(blocks.cross_attention(b, config, blocks.quantize(b, x, "input_clip"), starts, memory, ""))
    return b.build()


@cached
def feed_forward(config: LayerConfig, rows: int, mode: Mode) -> Program:
    """The feed-forward block by itself: x [M, H] -> [M, H]."""
    b = mode.builder("feed_forward", config.quant)
    x = b.input("x", (rows, config.hidden))
    b.output(blocks.feed_forward(b, config, blocks.quantize(b, x, "input_clip"), ""))
    return b.build()


@cached
def encoder_layer(config: LayerConfig, sentences: Sentences, mode: Mode, *, causal: bool = False) -> Program:
    """x [M, H] -> [M, H]. Causal, it is the layer of a decoder without a memory, as language models have it."""
    b = mode.builder("encoder_layer", config.quant)
    x, starts = _rows(b, "x", sentences, config)
    stream = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    update = blocks.self_attention(b, config, stream.rows, sentences, starts, "self_attn.", causal=causal)
    _finish_with_feed_forward(b, config, stream, update, "self_attn_layer_norm")
    return b.build()


@cached
def decoder_layer(config: LayerConfig, sentences: Sentences, source: Sentences, mode: Mode) -> Program:
    """x [M, H], memory [S, H] -> [M, H]."""
    b = mode.builder("decoder_layer", config.quant)
    x, starts = _rows(b, "x", sentences, config)
    stream = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    update = blocks.self_attention(b, config, stream.rows, sentences, starts, "self_attn.", causal=True)
    stream = blocks.between(
        b, config, stream, update, own="self_attn_layer_norm", following="encoder_attn_layer_norm",
        clip="encoder_attn.input_clip",
    )
    memory = _project_memory(b, config, source, "encoder_attn.")
    update = blocks.cross_attention(b, config, stream.rows, starts, memory, "encoder_attn.")
    _finish_with_feed_forward(b, config, stream, update, "encoder_attn_layer_norm")
    return b.build()


@cached
def decoder_memory(config: LayerConfig, rows: int, mode: Mode) -> Program:
    """Keys and values of the cross-attention for decoding: memory [S, H] -> [S, 2H], and the scale of their codes."""
    b = mode.builder("decoder_memory", config.quant)
    memory = b.input("memory", (rows, config.hidden))
    found = blocks.project_memory(b, config, memory, "encoder_attn.")
    b.output(blocks.tensor_of(found))
    if config.quant.quantized:
        b.output(found.scale)
    return b.build()


@cached
def decoder_step(config: LayerConfig, past: int, source: Sentences, mode: Mode) -> Program:
    """One step of incremental decoding: x [B, H] with what `past` steps left -> x; queries, keys and values of all.

    `history` [B * P, 3H] holds the rows of the steps before, `cross` [S, 2H] what decoder_memory made.
    """
    b = mode.builder("decoder_step", config.quant)
    hidden, batch = config.hidden, source.count
    sentences = Sentences.of(batch, batch, 1)
    x, starts = _rows(b, "x", sentences, config)
    dtype = torch.int8 if config.quant.quantized else torch.float32
    history = b.input("history", (batch * past, 3 * hidden), dtype)
    all_starts = b.input("history_starts", (batch + 1,), torch.int32)
    cross = b.input("cross", (source.rows, 2 * hidden), dtype)
    cross_scale = b.input("cross_scale", (1,)) if config.quant.quantized else None
    source_starts = source.starts(b, "source_starts")
    stream = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    qkv = blocks.project_self(b, config, stream.rows, "self_attn.")
    every = blocks.append(b, history, qkv, batch)
    own = Memory(
        rows=every, key_column=hidden, value_column=2 * hidden, starts=all_starts,
        longest=Sentences.of(0, 0, past + 1).longest,
    )
    context = blocks.attention(
        b, config, Queries(rows=qkv, column=0, starts=starts), own, "self_attn.", causal=False
    )
    update = blocks.project_out(b, config, context, "self_attn.")
    stream = blocks.between(
        b, config, stream, update, own="self_attn_layer_norm", following="encoder_attn_layer_norm",
        clip="encoder_attn.input_clip",
    )
    memory = Memory(
        rows=blocks.as_codes(qkv, cross, cross_scale), key_column=0, value_column=hidden, starts=source_starts,
        longest=source.longest,
    )
    update = blocks.cross_attention(b, config, stream.rows, starts, memory, "encoder_attn.")
    _finish_with_feed_forward(b, config, stream, update, "encoder_attn_layer_norm")
    b.output(blocks.tensor_of(every))
    return b.build()


@cached
def vocabulary_logits(quant: QuantConfig, rows: int, sizes: "Vocabulary", mode: Mode) -> Program:
    """x [M, H] -> logits [M, P], P being the padded vocabulary."""
    b = mode.builder("vocabulary_logits", quant)
    x = blocks.quantize(b, b.input("x", (rows, sizes.hidden)), "input_clip")
    b.output(
        blocks.project(
            b, x, "weight", (sizes.words, sizes.hidden), End(name="logits"), rows=sizes.padded, **sizes.start
        )
    )
    return b.build()


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Sizes of a projection onto a vocabulary."""

    words: int
    """V"""
    hidden: int
    """H"""
    padded: int
    """Rows of the weight's codes, at least V."""

    @property
    def start(self) -> dict[str, float]:
        """How the weight begins."""
        return {"deviation": self.hidden**-0.5}


@cached
def vocabulary_loss(
    quant: QuantConfig, rows: int, sizes: Vocabulary, mode: Mode, *, padding: int, smoothing: float
) -> Program:
    """x [M, H], target int64 [M] -> (loss [1], nll_loss [1]), summed over targets other than `padding`."""
    b = mode.builder("vocabulary_loss", quant)
    x = blocks.quantize(b, b.input("x", (rows, sizes.hidden)), "input_clip")
    target = b.input("target", (rows,), torch.int64)
    weight = b.weight("weight", (sizes.words, sizes.hidden), rows=sizes.padded, **sizes.start)
    losses = blocks.vocabulary_loss(
        b, x, weight, target, vocabulary=sizes.words, padding=padding, smoothing=smoothing
    )
    for loss in losses:
        b.output(loss)
    return b.build()


@dataclass(frozen=True, kw_only=True)
class Table:
    """What an embedding looks words and positions up in."""

    vocabulary: int
    hidden: int
    positions: int
    padding: int
    scale: float
    dropout: float
    learned: bool
    """Whether positions are learned."""


@cached
def embedding(quant: QuantConfig, rows: int, table: Table, mode: Mode) -> Program:
    """tokens int64 [M], places int64 [M] -> x [M, H] = dropout(scale * weight[token] + position[place])."""
    b = mode.builder("embedding", quant)
    tokens, places = (b.input(name, (rows,), torch.int64) for name in ("tokens", "places"))
    start = {"kind": Kind.TABLE, "deviation": table.hidden**-0.5}
    weight = b.parameter("weight", (table.vocabulary, table.hidden), **start)
    size = (table.positions, table.hidden)
    positions = b.parameter("position_weight", size, **start) if table.learned else b.input("position_weight", size)
    x = b.tensor("x", (rows, table.hidden))
    b.add(
        Embed(
            tokens=tokens, places=places, weight=weight, table=positions, scale=table.scale, padding=table.padding,
            dropout=b.dropout(table.dropout), learned=table.learned, x=x,
        )
    )
    b.output(x)
    return b.build()


def _rows(b: Builder, name: str, sentences: Sentences, config: LayerConfig) -> tuple[VirtualTensor, VirtualTensor]:
    """The inputs [M, H] and [B + 1] of packed sentences."""
    return b.input(name, (sentences.rows, config.hidden)), sentences.starts(b, "starts")


def _project_memory(b: Builder, config: LayerConfig, source: Sentences, prefix: str) -> Memory:
    memory = b.input("memory", (source.rows, config.hidden))
    starts = source.starts(b, "memory_starts")
    rows = blocks.project_memory(b, config, memory, prefix)
    return Memory(rows=rows, key_column=0, value_column=config.hidden, starts=starts, longest=source.longest)


def _finish_with_feed_forward(b: Builder, config: LayerConfig, stream: Stream, update: VirtualTensor, own: str) -> None:
    stream = blocks.between(
        b, config, stream, update, own=own, following="final_layer_norm", clip="feed_forward.input_clip"
    )
    update = blocks.feed_forward(b, config, stream.rows, "feed_forward.")
    b.output(blocks.leave(b, config, stream, update, "final_layer_norm"))
