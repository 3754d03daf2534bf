"""Programs of whole layers, built once per configuration and sizes.

Rows are packed: the tokens of a batch, sentence after sentence. Names of parameters are those of
    the modules.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps

import torch

from lsq.config import Adapter, LayerConfig, QuantConfig
from lsq.gemm.cuda import choices
from lsq.layers import blocks
from lsq.layers.blocks import Epilogue, Memory, PackedSequences, Residual
from lsq.layers.builder import LayerBuilder
from lsq.ops.embedding import Embed
from lsq.ops.vocabulary_loss import Prediction
from lsq.program.backend import Backend
from lsq.program.parameters import Kind
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor

PROGRAMS_KEPT = 512
"""Programs of the sizes seen last that are kept, for each kind of layer."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The mode in which a program runs."""

    training: bool
    """Dropout is active."""
    backward: bool
    """There is a backward pass."""
    backend: Backend
    wanted: frozenset[str] | None = None
    """Names of the inputs and parameters that need a gradient; None: all of them."""

    def builder(
        self, name: str, quant: QuantConfig, adapters: Iterable[Adapter] = ()
    ) -> LayerBuilder:
        """An empty program of that name."""
        made = LayerBuilder(
            name,
            quant,
            training=self.training,
            backward=self.backward if self.wanted is None else self.wanted,
            backend=self.backend,
        )
        made.adapters = {one.weight: one for one in adapters}
        return made


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The call that made a program: `build(**arguments)`."""

    build: Callable[..., Program]
    arguments: Mapping[str, object]


origins: weakref.WeakKeyDictionary[Program, Origin] = weakref.WeakKeyDictionary()
"""Origins of every program of a `cached` function."""


def cached(build):
    """Keep what `build` returned for the arguments seen last, as long as the same files of tuned
    products are used.

    Those decide how much scratch memory operations take.
    """
    signature = inspect.signature(build)

    @lru_cache(maxsize=PROGRAMS_KEPT)
    def kept(made, *arguments, **named) -> Program:
        built = build(*arguments, **named)
        origins[built] = Origin(
            build=program, arguments=signature.bind(*arguments, **named).arguments
        )
        return built

    @wraps(build)
    def program(*arguments, **named) -> Program:
        return kept(choices(), *arguments, **named)

    return program


@cached
def linear(
    quant: QuantConfig,
    rows: int,
    inputs: int,
    outputs: int,
    mode: Mode,
    *,
    bias: bool,
    in_out: bool = False,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3,
) -> Program:
    """A projection by itself: x [M, K] -> y [M, N].

    `in_out`: its weight is [K, N]. dtypes: of x, weight and y.

    In float mode all floats are float32.
    """
    dtypes = dtypes if quant.coded else (torch.float32,) * 3
    b = mode.builder("linear", quant)
    x = b.round(b.input("x", (rows, inputs), dtypes[0]), "input_clip")
    bound = blocks.fan_in(inputs)
    b.output(
        blocks.project(
            b,
            x,
            "weight",
            (outputs, inputs),
            Epilogue(name="y", dtype=dtypes[2]),
            bias="bias" if bias else None,
            bound=bound,
            bias_bound=bound,
            in_out=in_out,
            dtype=dtypes[1],
        ).floats
    )
    return b.build()


@cached
def self_attention(
    config: LayerConfig, sentences: PackedSequences, mode: Mode, *, causal: bool
) -> Program:
    """Multi-head self-attention by itself: x [M, H] -> [M, H]."""
    b = mode.builder("self_attention", config.quant)
    x, cu_seqlens = packed(b, "x", sentences, config)
    b.output(
        blocks.self_attention(b, config, b.round(x, "input_clip"), cu_seqlens, "", causal=causal)
    )
    return b.build()


@cached
def cross_attention(
    config: LayerConfig, sentences: PackedSequences, source: PackedSequences, mode: Mode
) -> Program:
    """Multi-head attention over a memory by itself: x [M, H], memory [S, H] -> [M, H]."""
    b = mode.builder("cross_attention", config.quant)
    x, cu_seqlens = packed(b, "x", sentences, config)
    memory = _project_memory(b, config, source, "")
    b.output(blocks.cross_attention(b, config, b.round(x, "input_clip"), cu_seqlens, memory, ""))
    return b.build()


@cached
def feed_forward(config: LayerConfig, rows: int, mode: Mode) -> Program:
    """The feed-forward block by itself: x [M, H] -> [M, H]."""
    b = mode.builder("feed_forward", config.quant)
    x = b.input("x", (rows, config.hidden))
    b.output(blocks.feed_forward(b, config, b.round(x, "input_clip"), ""))
    return b.build()


@cached
def encoder_layer(
    config: LayerConfig,
    sentences: PackedSequences,
    mode: Mode,
    *,
    causal: bool = False,
    heads: bool = False,
) -> Program:
    """x [M, H] -> [M, H].

    Causal, it is the layer of a decoder without a memory, as language models have it.

    `heads`: queries, keys and values [M, ...] and the scale of their codes come out as well, for
    decoding.
    """
    b = mode.builder("encoder_layer", config.quant, config.adapters)
    x, cu_seqlens = packed(b, "x", sentences, config)
    residual = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    qkv = blocks.project_heads(b, config, residual.rows, "self_attn.qkv", 3)
    update = blocks.self_attention(
        b, config, residual.rows, cu_seqlens, "self_attn.", causal=causal, qkv=qkv
    )
    finish_with_feed_forward(b, config, residual, update, "self_attn_layer_norm")
    if heads:
        b.output(qkv.tensor)
        if config.quant.coded:
            b.output(qkv.scale)
    return b.build()


@cached
def decoder_layer(
    config: LayerConfig, sentences: PackedSequences, source: PackedSequences, mode: Mode
) -> Program:
    """x [M, H], memory [S, H] -> [M, H]."""
    b = mode.builder("decoder_layer", config.quant, config.adapters)
    x, cu_seqlens = packed(b, "x", sentences, config)
    residual = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    update = blocks.self_attention(b, config, residual.rows, cu_seqlens, "self_attn.", causal=True)
    residual = blocks.between(
        b,
        config,
        residual,
        update,
        own="self_attn_layer_norm",
        following="encoder_attn_layer_norm",
        clip="encoder_attn.input_clip",
    )
    memory = _project_memory(b, config, source, "encoder_attn.")
    update = blocks.cross_attention(b, config, residual.rows, cu_seqlens, memory, "encoder_attn.")
    finish_with_feed_forward(b, config, residual, update, "encoder_attn_layer_norm")
    return b.build()


@cached
def vocabulary_logits(quant: QuantConfig, rows: int, sizes: "Vocabulary", mode: Mode) -> Program:
    """x [M, H] -> logits [M, P], P being the padded vocabulary."""
    b = mode.builder("vocabulary_logits", quant)
    x = b.round(b.input("x", (rows, sizes.hidden)), "input_clip")
    b.output(
        blocks.project(
            b,
            x,
            "weight",
            (sizes.words, sizes.hidden),
            Epilogue(name="logits"),
            rows=sizes.padded,
            **sizes.start,
        ).floats
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
        """Initialisation of the weight."""
        return {"deviation": self.hidden**-0.5}


@cached
def vocabulary_loss(
    quant: QuantConfig, rows: int, sizes: Vocabulary, mode: Mode, *, padding: int, smoothing: float
) -> Program:
    """x [M, H], target int64 [M] -> (loss [1], nll_loss [1]), summed over targets other than
    `padding`."""
    b = mode.builder("vocabulary_loss", quant)
    x = b.round(b.input("x", (rows, sizes.hidden)), "input_clip")
    target = b.input("target", (rows,), torch.int64)
    weight = b.unpacked_weight(
        "weight", (sizes.words, sizes.hidden), rows=sizes.padded, **sizes.start
    )
    prediction = Prediction(
        x=x,
        weight=weight,
        target=target,
        vocabulary=sizes.words,
        padding=padding,
        smoothing=smoothing,
    )
    for loss in blocks.vocabulary_loss(b, prediction):
        b.output(loss)
    return b.build()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Sizes and options of an embedding."""

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
    """tokens int64 [M], places int64 [M] -> x [M, H] = dropout(scale * weight[token] +
    position[place])."""
    b = mode.builder("embedding", quant)
    tokens, places = (b.input(name, (rows,), torch.int64) for name in ("tokens", "places"))
    start = {"kind": Kind.TABLE, "deviation": table.hidden**-0.5}
    weight = b.parameter("weight", (table.vocabulary, table.hidden), **start)
    size = (table.positions, table.hidden)
    positions = (
        b.parameter("position_weight", size, **start)
        if table.learned
        else b.input("position_weight", size)
    )
    x = b.tensor("x", (rows, table.hidden))
    b.add(
        Embed(
            tokens=tokens,
            positions=places,
            weight=weight,
            table=positions,
            scale=table.scale,
            padding=table.padding,
            dropout=b.dropout(table.dropout),
            learned=table.learned,
            x=x,
        )
    )
    b.output(x)
    return b.build()


def packed(
    b: LayerBuilder, name: str, sentences: PackedSequences, config: LayerConfig
) -> tuple[VirtualTensor, VirtualTensor]:
    """The inputs [M, H] and [B + 1] of packed sentences."""
    return b.input(name, (sentences.rows, config.hidden)), sentences.cu_seqlens(b, "cu_seqlens")


def _project_memory(
    b: LayerBuilder, config: LayerConfig, source: PackedSequences, prefix: str
) -> Memory:
    memory = b.input("memory", (source.rows, config.hidden))
    cu_seqlens = source.cu_seqlens(b, "memory_cu_seqlens")
    rows = blocks.project_memory(b, config, memory, prefix)
    return Memory(rows=rows, key_column=0, cu_seqlens=cu_seqlens)


def finish_with_feed_forward(
    b: LayerBuilder, config: LayerConfig, residual: Residual, update: VirtualTensor, own: str
) -> None:
    """The end of a layer: the residual addition of `update`, whose norm is `own`, and the
    feed-forward block."""
    residual = blocks.between(
        b,
        config,
        residual,
        update,
        own=own,
        following="final_layer_norm",
        clip="feed_forward.input_clip",
    )
    update = blocks.feed_forward(b, config, residual.rows, "feed_forward.")
    b.output(blocks.leave(b, config, residual, update, "final_layer_norm"))
