"""Programs of decoding: the encoder as a whole, and one step of the decoder with all layers.

They are made of the blocks that the modules are made of, under the names of DecodingModel, so that
their integers are the same. M rows of packed sentences, R rows of a step, H hidden.
"""

from dataclasses import replace

import torch

from lsq.layers import blocks
from lsq.layers.blocks import Epilogue, PackedSequences, Residual
from lsq.layers.builder import LayerBuilder
from lsq.layers.programs import Mode
from lsq.ops.cached_attention import CachedAttention
from lsq.ops.embedding import Embed
from lsq.program.parameters import Kind
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Rows
from lsq.run.backends import Backend
from lsq.serving.decode.architecture import Architecture, StackArchitecture

PROJECTION_CLIP = "decoder.output_projection.input_clip"


def builder_of(name: str, architecture: Architecture, backend: Backend) -> LayerBuilder:
    """An empty program that decodes there, with weights that need not be unpacked, however they are
    stored."""
    quant = architecture.decoder.config.quant
    quant = replace(quant, weight_format="int8", clips="learned" if quant.learned else "absmax")
    return Mode(training=False, backward=False, backend=backend).builder(name, quant)


def encoder_program(
    architecture: Architecture, sentences: PackedSequences, backend: Backend
) -> Program:
    """tokens, places int64 [M], cu_seqlens int32 [B + 1] -> for each decoder layer keys and values
    int8 [M, 2H], scale.
    """
    b, stack = builder_of("encoder", architecture, backend), architecture.encoder
    x, cu_seqlens = (
        embedded(b, architecture, "encoder", sentences.rows),
        sentences.cu_seqlens(b, "cu_seqlens"),
    )

    def attend(prefix: str, rows: Rows) -> VirtualTensor:
        return blocks.self_attention(
            b, stack.config, rows, cu_seqlens, prefix + "self_attn.", causal=False
        )

    residual, update = layers(b, "encoder", stack, x, attend)
    last = blocks.leave(b, stack.config, residual, update, last_norm("encoder", stack))
    if stack.final_norm:
        last = blocks.norm(
            b, stack.config, last, None, name="encoder.layer_norm", clip=None, keep_float=True
        ).out
    for index in range(architecture.decoder.layers):
        prefix = f"decoder.layers.{index}.encoder_attn."
        found = blocks.project_memory(b, architecture.decoder.config, last, prefix)
        b.output(found.tensor)
        b.output(found.scale)
    return b.build()


def step_program(architecture: Architecture, rows: int, backend: Backend) -> Program:
    """tokens, places int64 [R] -> codes int8 [R, H] for the projection onto the vocabulary, and
    their scale.

    Further inputs are what CachedAttention reads: for every layer `cache.<layer>`, of a translation
    also `memory.<layer>` and `memory_scale.<layer>`; `lists`, `lengths`, `owned` for the caches,
    and of a translation `memory_lists`, `memory_lengths`, `sentence` for the memories. Their first
    dimensions, given as 1 here, may be any.
    """
    b, stack = builder_of("decoder_step", architecture, backend), architecture.decoder
    config, hidden = stack.config, stack.config.hidden
    x = embedded(b, architecture, "decoder", rows)
    kept = indices(b, rows, "lists", "lengths", "owned")
    memory = (
        None
        if architecture.encoder is None
        else indices(b, rows, "memory_lists", "memory_lengths", "sentence")
    )

    def attend(prefix: str, found: Rows) -> VirtualTensor:
        index = prefix.split(".")[2]
        qkv = blocks.project_heads(b, config, found, prefix + "self_attn.qkv", 3)
        cache = b.input(f"cache.{index}", (1, 2 * hidden), torch.int8)
        return attended(
            b,
            stack,
            prefix + "self_attn.",
            qkv,
            cache=cache,
            cache_scale=qkv.scale,
            appends=True,
            **kept,
        )

    def attend_to_memory(prefix: str, found: Rows) -> VirtualTensor:
        index = prefix.split(".")[2]
        queries = blocks.project_heads(b, config, found, prefix + "encoder_attn.query", 1)
        cache = b.input(f"memory.{index}", (1, 2 * hidden), torch.int8)
        scale = b.input(f"memory_scale.{index}", (1,))
        return attended(
            b,
            stack,
            prefix + "encoder_attn.",
            queries,
            cache=cache,
            cache_scale=scale,
            appends=False,
            **memory,
        )

    residual, update = layers(
        b, "decoder", stack, x, attend, None if memory is None else attend_to_memory
    )
    own = last_norm("decoder", stack)
    if config.pre_norm and not stack.final_norm:
        coded = b.round(blocks.leave(b, config, residual, update, own), PROJECTION_CLIP).coded
    else:
        following = blocks.between(
            b,
            config,
            residual,
            update,
            own=own,
            following="decoder.layer_norm",
            clip=PROJECTION_CLIP,
        )
        coded = following.rows.coded
    b.output(coded.codes)
    b.output(coded.scale)
    return b.build()


def embedded(b: LayerBuilder, architecture: Architecture, side: str, rows: int) -> VirtualTensor:
    """Words and positions [M, H] of `tokens` and `places`."""
    stack: StackArchitecture = architecture.stacks[side]
    hidden, prefix = stack.config.hidden, f"{side}.embed_tokens."
    words = "decoder.embed_tokens.weight" if architecture.shared_words else prefix + "weight"
    x, size = (
        b.tensor("x", (rows, hidden)),
        (stack.max_positions + architecture.padding + 1, hidden),
    )
    tokens, places = (b.input(name, (rows,), torch.int64) for name in ("tokens", "places"))
    table, learned = prefix + "position_weight", stack.positions == "learned"
    b.add(
        Embed(
            tokens=tokens,
            positions=places,
            weight=b.parameter(words, (stack.words, hidden), Kind.TABLE),
            table=b.parameter(table, size, Kind.TABLE) if learned else b.input(table, size),
            scale=stack.embedding_scale,
            padding=architecture.padding,
            learned=learned,
            x=x,
        )
    )
    if not stack.embedding_norm:
        return x
    config = replace(stack.config, norm="layer", layer_norm_epsilon=1e-5)
    return blocks.norm(
        b, config, x, None, name=prefix + "layer_norm", clip=None, keep_float=True
    ).out


def layers(
    b: LayerBuilder,
    side: str,
    stack: StackArchitecture,
    x: VirtualTensor,
    attend,
    attend_to_memory=None,
) -> tuple[Residual, VirtualTensor]:
    """All layers of a stack: (what the last block is added to, what it adds).

    `attend` and `attend_to_memory` make attention of a layer, by its prefix and what it reads.
    Where a layer ends and the next one begins, one operation adds, normalises and rounds, as
    between two blocks of a layer.
    """
    config, residual, update = stack.config, None, None
    for index in range(stack.layers):
        prefix = f"{side}.layers.{index}."
        first = {
            "following": prefix + "self_attn_layer_norm",
            "clip": prefix + "self_attn.input_clip",
        }
        if residual is None:
            residual = blocks.enter(b, config, x, first["following"], first["clip"])
        else:
            before = f"{side}.layers.{index - 1}.final_layer_norm"
            residual = blocks.between(b, config, residual, update, own=before, **first)
        own, update = prefix + "self_attn_layer_norm", attend(prefix, residual.rows)
        if attend_to_memory is not None:
            residual = blocks.between(
                b,
                config,
                residual,
                update,
                own=own,
                following=prefix + "encoder_attn_layer_norm",
                clip=prefix + "encoder_attn.input_clip",
            )
            own, update = (
                prefix + "encoder_attn_layer_norm",
                attend_to_memory(prefix, residual.rows),
            )
        residual = blocks.between(
            b,
            config,
            residual,
            update,
            own=own,
            following=prefix + "final_layer_norm",
            clip=prefix + "feed_forward.input_clip",
        )
        update = blocks.feed_forward(b, config, residual.rows, prefix + "feed_forward.")
    return residual, update


def last_norm(side: str, stack: StackArchitecture) -> str:
    """The name of the last layer's own last norm."""
    return f"{side}.layers.{stack.layers - 1}.final_layer_norm"


def indices(
    b: LayerBuilder, rows: int, lists: str, lengths: str, owned: str
) -> dict[str, VirtualTensor]:
    """Inputs of those names, by which rows find keys in caches."""
    return {
        "lists": b.input(lists, (1, 1), torch.int64),
        "lengths": b.input(lengths, (1,), torch.int64),
        "owned": b.input(owned, (rows,), torch.int64),
    }


def attended(
    b: LayerBuilder, stack: StackArchitecture, prefix: str, queries: Rows, **cached
) -> VirtualTensor:
    """Attention of queries to a cache, and its output projection: floats [R, H]."""
    hidden, rows = stack.config.hidden, queries.tensor.shape[0]
    context = b.result(prefix + "context", (rows, hidden), prefix + "context_clip")
    b.add(
        CachedAttention(
            queries=queries.coded.bare(),
            heads=stack.config.heads,
            context=context.rounded,
            **cached,
        )
    )
    return blocks.project(
        b,
        context.rows,
        prefix + "out_weight",
        (hidden, hidden),
        Epilogue(name=prefix + "out"),
        bias=blocks.bias_of(stack.config, prefix + "out"),
    ).floats
