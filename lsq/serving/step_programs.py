"""Programs of decoding: the encoder as a whole, and one step of the decoder with all layers.

They are made of the blocks of the modules, under the names of DecodingModel, so that their integers
are the same. M rows of packed sentences, R rows of a step, H hidden.
"""

from dataclasses import replace

import torch

from lsq.layers import blocks
from lsq.layers.blocks import PackedSequences, Residual
from lsq.layers.builder import Epilogue, LayerBuilder, Mode
from lsq.ops.cached_attention import CachedAttention
from lsq.ops.embedding import Embed
from lsq.program.program import Program
from lsq.program.tensor import Kind, VirtualTensor
from lsq.program.values import Rows
from lsq.run.backends import Backend
from lsq.serving.architecture import Architecture, StackArchitecture

PROJECTION_CLIP = "decoder.output_projection.input_clip"


def builder_of(name: str, architecture: Architecture, backend: Backend) -> LayerBuilder:
    """Begin a program for decoding; its weights need not be unpacked, however they are stored."""
    quant = architecture.decoder.config.quant
    quant = replace(quant, weight_format="int8", clips="learned" if quant.learned else "absmax")
    return Mode(training=False, backward=False, backend=backend).builder(name, quant)


def encoder_program(
    architecture: Architecture, sentences: PackedSequences, backend: Backend
) -> Program:
    """tokens, positions int64 [M], cu_seqlens int32 [B + 1] -> for each decoder layer keys and
    values int8 [M, 2H], and their scale."""
    b, stack = builder_of("encoder", architecture, backend), architecture.encoder
    x = embedded(b, architecture, "encoder", sentences.rows)
    cu_seqlens = sentences.cu_seqlens(b, "cu_seqlens")

    def attend(prefix: str, rows: Rows) -> VirtualTensor:
        return blocks.self_attention(
            b, stack.config, rows, cu_seqlens, prefix + "self_attn.", causal=False
        )

    residual, update = layers(b, "encoder", stack, x, attend)
    last = blocks.leave(b, stack.config, residual, update, last_norm("encoder", stack))
    if stack.final_norm:
        last = blocks.norm(
            b, stack.config, last, None, name="encoder.layer_norm", clip=None, keep_float=True
        ).floats
    for index in range(architecture.decoder.layers):
        prefix = f"decoder.layers.{index}.encoder_attn."
        coded = blocks.project_memory(b, architecture.decoder.config, last, prefix)
        b.output(coded.tensor)
        b.output(coded.scale)
    return b.build()


def step_program(architecture: Architecture, rows: int, backend: Backend) -> Program:
    """tokens, positions int64 [R] -> codes int8 [R, H] for the projection onto the vocabulary, and
    their scale.

    Further inputs are those of CachedAttention: `cache.<layer>` for every layer, and `lists`,
    `lengths`, `owned` for these caches; of a translation also `encoder_out.<layer>` and
    `encoder_scale.<layer>`, and `encoder_lists`, `encoder_lengths`, `sentence` for them. Their
    first dimensions, declared as 1 here, may be any.
    """
    b, stack = builder_of("decoder_step", architecture, backend), architecture.decoder
    config, hidden = stack.config, stack.config.hidden
    x = embedded(b, architecture, "decoder", rows)
    own = indices(b, rows, "lists", "lengths", "owned")
    of_encoder = None
    if architecture.encoder is not None:
        of_encoder = indices(b, rows, "encoder_lists", "encoder_lengths", "sentence")

    def attend(prefix: str, values: Rows) -> VirtualTensor:
        index, prefix = prefix.split(".")[2], prefix + "self_attn."
        qkv = blocks.project_heads(b, config, values, prefix + "qkv", 3)
        cache = b.input(f"cache.{index}", (1, 2 * hidden), torch.int8)
        cached = {"cache": cache, "cache_scale": qkv.scale, "appends": True}
        return attended(b, stack, prefix, qkv, **cached, **own)

    def attend_to_encoder(prefix: str, values: Rows) -> VirtualTensor:
        index, prefix = prefix.split(".")[2], prefix + "encoder_attn."
        queries = blocks.project_heads(b, config, values, prefix + "query", 1)
        cache = b.input(f"encoder_out.{index}", (1, 2 * hidden), torch.int8)
        scale = b.input(f"encoder_scale.{index}", (1,))
        cached = {"cache": cache, "cache_scale": scale, "appends": False}
        return attended(b, stack, prefix, queries, **cached, **of_encoder)

    residual, update = layers(
        b, "decoder", stack, x, attend, None if of_encoder is None else attend_to_encoder
    )
    norm = last_norm("decoder", stack)
    if config.pre_norm and not stack.final_norm:
        last = blocks.leave(b, config, residual, update, norm)
        coded = b.round(last, PROJECTION_CLIP).coded
    else:
        clip, following = PROJECTION_CLIP, "decoder.layer_norm"
        names = {"own": norm, "following": following, "clip": clip}
        coded = blocks.between(b, config, residual, update, **names).rows.coded
    b.output(coded.codes)
    b.output(coded.scale)
    return b.build()


def embedded(b: LayerBuilder, architecture: Architecture, side: str, rows: int) -> VirtualTensor:
    """Sum the embeddings [M, H] of `tokens` and `positions`, normalised if the stack says so."""
    stack: StackArchitecture = architecture.stacks[side]
    hidden, prefix = stack.config.hidden, f"{side}.embed_tokens."
    words = "decoder.embed_tokens.weight" if architecture.shared_words else prefix + "weight"
    x = b.tensor("x", (rows, hidden))
    size = (stack.max_positions + architecture.padding + 1, hidden)
    tokens, positions = (b.input(name, (rows,), torch.int64) for name in ("tokens", "positions"))
    table, learned = prefix + "position_weight", stack.positions == "learned"
    b.add(
        Embed(
            tokens=tokens,
            positions=positions,
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
    ).floats


def layers(
    b: LayerBuilder,
    side: str,
    stack: StackArchitecture,
    x: VirtualTensor,
    attend,
    attend_to_encoder=None,
) -> tuple[Residual, VirtualTensor]:
    """Add all layers of a stack; return (the residual of the last block, its update).

    `attend` and `attend_to_encoder` add attention of a layer, given its prefix and its input.
    Between two layers one operation adds, normalises and rounds, as between two blocks of a layer.
    """
    config, residual, update = stack.config, None, None
    for index in range(stack.layers):
        prefix = f"{side}.layers.{index}."
        norm, clip = prefix + "self_attn_layer_norm", prefix + "self_attn.input_clip"
        if residual is None:
            residual = blocks.enter(b, config, x, norm, clip)
        else:
            own = f"{side}.layers.{index - 1}.final_layer_norm"
            residual = blocks.between(
                b, config, residual, update, own=own, following=norm, clip=clip
            )
        own, update = norm, attend(prefix, residual.rows)
        if attend_to_encoder is not None:
            norm, clip = prefix + "encoder_attn_layer_norm", prefix + "encoder_attn.input_clip"
            residual = blocks.between(
                b, config, residual, update, own=own, following=norm, clip=clip
            )
            own, update = norm, attend_to_encoder(prefix, residual.rows)
        norm, clip = prefix + "final_layer_norm", prefix + "feed_forward.input_clip"
        residual = blocks.between(b, config, residual, update, own=own, following=norm, clip=clip)
        update = blocks.feed_forward(b, config, residual.rows, prefix + "feed_forward.")
    return residual, update


def last_norm(side: str, stack: StackArchitecture) -> str:
    """Return the name of the last norm of the last layer."""
    return f"{side}.layers.{stack.layers - 1}.final_layer_norm"


def indices(
    b: LayerBuilder, rows: int, lists: str, lengths: str, owned: str
) -> dict[str, VirtualTensor]:
    """Declare inputs of these names, by which rows find keys in caches."""
    return {
        "lists": b.input(lists, (1, 1), torch.int64),
        "lengths": b.input(lengths, (1,), torch.int64),
        "owned": b.input(owned, (rows,), torch.int64),
    }


def attended(
    b: LayerBuilder, stack: StackArchitecture, prefix: str, queries: Rows, **cached
) -> VirtualTensor:
    """Add attention of queries to a cache and its output projection: floats [R, H]."""
    config, rows = stack.config, queries.tensor.shape[0]
    context = b.result(prefix + "context", (rows, config.hidden), prefix + "context_clip")
    b.add(
        CachedAttention(
            queries=queries.coded.bare(), heads=config.heads, context=context.rounded, **cached
        )
    )
    return b.project(
        context.rows,
        prefix + "out_weight",
        (config.hidden, config.hidden),
        Epilogue(name=prefix + "out"),
        bias=blocks.bias_of(config, prefix + "out"),
    ).floats
