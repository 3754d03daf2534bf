"""Programs of Transformer layers, built once for each configuration and size of a batch."""

from dataclasses import dataclass
from functools import partial

import torch

from lsq.config import DIMENSION_MULTIPLE, LayerConfig, QuantConfig
from lsq.layers import blocks
from lsq.layers.blocks import AdaptedBuilder, Memory, PackedSequences, Residual
from lsq.layers.builder import Epilogue, LayerBuilder, Mode, cached
from lsq.ops.embedding import Embed
from lsq.ops.rounding import unpacked
from lsq.ops.vocabulary_loss import KeptWords, Prediction, VocabularyLoss
from lsq.program.program import Program
from lsq.program.tensor import Kind, VirtualTensor


@cached
def self_attention(
    config: LayerConfig, sentences: PackedSequences, mode: Mode, *, causal: bool
) -> Program:
    """Multi-head self-attention by itself: x [M, H] -> [M, H]."""
    b = mode.builder("self_attention", config.quant)
    x, cu_seqlens = packed(b, sentences, config)
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
    x, cu_seqlens = packed(b, sentences, config)
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
    """An encoder layer: x [M, H] -> [M, H]; `heads`: also queries, keys, values and their scale."""
    b = _layer_builder("encoder_layer", config, mode)
    x, cu_seqlens = packed(b, sentences, config)
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
    """A decoder layer: x [M, H], memory [S, H] -> [M, H]."""
    b = _layer_builder("decoder_layer", config, mode)
    x, cu_seqlens = packed(b, sentences, config)
    residual = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    update = blocks.self_attention(b, config, residual.rows, cu_seqlens, "self_attn.", causal=True)
    residual = before_cross_attention(b, config, residual, update)
    memory = _project_memory(b, config, source, "encoder_attn.")
    update = blocks.cross_attention(b, config, residual.rows, cu_seqlens, memory, "encoder_attn.")
    finish_with_feed_forward(b, config, residual, update, "encoder_attn_layer_norm")
    return b.build()


def padded_words(quant: QuantConfig, words: int) -> int:
    """Round the size of a vocabulary up to P, the rows of codes that int8 products need."""
    multiple = DIMENSION_MULTIPLE if quant.coded else 1
    return -(-words // multiple) * multiple


@cached
def vocabulary_logits(
    quant: QuantConfig, rows: int, words: int, hidden: int, mode: Mode
) -> Program:
    """Logits: x [M, H] -> [M, P], P being the padded vocabulary."""
    b = mode.builder("vocabulary_logits", quant)
    x = b.round(b.input("x", (rows, hidden)), "input_clip")
    weight = {"rows": padded_words(quant, words), "deviation": hidden**-0.5}
    end = Epilogue(name="logits")
    b.output(b.project(x, "weight", (words, hidden), end, **weight).floats)
    return b.build()


@cached
def vocabulary_loss(
    quant: QuantConfig,
    rows: int,
    words: int,
    hidden: int,
    mode: Mode,
    *,
    padding: int,
    smoothing: float,
) -> Program:
    """Losses: x [M, H], target int64 [M] -> (loss [1], nll_loss [1]), sums without `padding`."""
    b = mode.builder("vocabulary_loss", quant)
    x = b.round(b.input("x", (rows, hidden)), "input_clip")
    target = b.input("target", (rows,), torch.int64)
    weight = {"rows": padded_words(quant, words), "deviation": hidden**-0.5}
    prediction = Prediction(
        x=x,
        weight=unpacked(b, b.weight("weight", (words, hidden), **weight)),
        target=target,
        vocabulary=words,
        padding=padding,
        smoothing=smoothing,
    )
    loss, nll = b.tensor("loss", (1,)), b.tensor("nll_loss", (1,))
    saved = {}
    if b.backward:
        saved["normaliser"] = b.tensor("log_normaliser", (rows,))
        if b.keeps_codes and quant.backward == "int8":
            saved["bound"] = b.tensor("d_logits.bound", (rows,))
            if not b.needs_gradient(prediction.weight.clip):
                saved["kept"] = KeptWords(
                    likeliest=b.tensor("d_logits.likeliest", (rows,), torch.int64),
                    gradient=b.tensor("d_logits.kept", (2, rows)),
                )
    b.add(VocabularyLoss(prediction=prediction, loss=loss, nll=nll, **saved))
    b.output(loss)
    b.output(nll)
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


@cached
def embedding(quant: QuantConfig, rows: int, table: Table, mode: Mode) -> Program:
    """tokens, positions int64 [M] -> dropout(scale * weight[token] + position_weight[position])."""
    b = mode.builder("embedding", quant)
    tokens, positions = (b.input(name, (rows,), torch.int64) for name in ("tokens", "positions"))
    start = {"kind": Kind.TABLE, "deviation": table.hidden**-0.5}
    weight = b.parameter("weight", (table.vocabulary, table.hidden), **start)
    size = (table.positions, table.hidden)
    position_weight = (
        b.parameter("position_weight", size, **start)
        if table.learned
        else b.input("position_weight", size)
    )
    x = b.tensor("x", (rows, table.hidden))
    b.add(
        Embed(
            tokens=tokens,
            positions=positions,
            weight=weight,
            table=position_weight,
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
    b: LayerBuilder, sentences: PackedSequences, config: LayerConfig
) -> tuple[VirtualTensor, VirtualTensor]:
    """Declare the inputs x [M, H] and cu_seqlens [B + 1] of packed sentences."""
    return b.input("x", (sentences.rows, config.hidden)), sentences.cu_seqlens(b, "cu_seqlens")


def before_cross_attention(
    b: LayerBuilder, config: LayerConfig, residual: Residual, update: VirtualTensor
) -> Residual:
    """Add the result of a decoder layer's self-attention; enter its cross-attention."""
    names = "self_attn_layer_norm", "encoder_attn_layer_norm", "encoder_attn.input_clip"
    own, following, clip = names
    return blocks.between(b, config, residual, update, own=own, following=following, clip=clip)


def finish_with_feed_forward(
    b: LayerBuilder, config: LayerConfig, residual: Residual, update: VirtualTensor, own: str
) -> None:
    """Add `update`, whose norm is `own`, then the feed-forward block; output the result."""
    last, clip = "final_layer_norm", "feed_forward.input_clip"
    residual = blocks.between(b, config, residual, update, own=own, following=last, clip=clip)
    update = blocks.feed_forward(b, config, residual.rows, "feed_forward.")
    b.output(blocks.leave(b, config, residual, update, last))


def _layer_builder(name: str, config: LayerConfig, mode: Mode) -> LayerBuilder:
    if not config.adapters:
        return mode.builder(name, config.quant)
    return mode.builder(name, config.quant, partial(AdaptedBuilder, adapters=config.adapters))


def _project_memory(
    b: LayerBuilder, config: LayerConfig, source: PackedSequences, prefix: str
) -> Memory:
    memory = b.input("memory", (source.rows, config.hidden))
    cu_seqlens = source.cu_seqlens(b, "memory_cu_seqlens")
    rows = blocks.project_memory(b, config, memory, prefix)
    return Memory(rows=rows, key_column=0, cu_seqlens=cu_seqlens)
