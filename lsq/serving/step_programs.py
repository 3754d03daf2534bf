"""Programs of decoding: the whole encoder, and one step of the decoder with all layers.

They use the modules' blocks and the names of DecodingModel, so that they compute the same integers.
M rows of packed sentences, R rows of a step, H hidden.
"""

from collections.abc import Callable, Mapping
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
from lsq.serving.stored_codes import as_int8

PROJECTION_CLIP = "decoder.output_projection.input_clip"


def builder_of(name: str, architecture: Architecture, backend: Backend) -> LayerBuilder:
    quant = as_int8(architecture.decoder.config.quant)
    return Mode(training=False, backward=False, backend=backend).builder(name, quant)


def encoder_program(
    architecture: Architecture, sentences: PackedSequences, backend: Backend
) -> Program:
    """Build the encoder: tokens, positions int64 [M], cu_seqlens int32 [B + 1] -> for each decoder
    layer keys and values int8 [M, 2H], and their scale."""
    b, stack = builder_of("encoder", architecture, backend), architecture.encoder
    x = embedded(b, architecture, "encoder", sentences.rows)
    cu_seqlens = sentences.cu_seqlens(b, "cu_seqlens")

    def attend(index: int, rows: Rows) -> VirtualTensor:
        prefix = f"encoder.layers.{index}.self_attn."
        return blocks.self_attention(b, stack.config, rows, cu_seqlens, prefix, causal=False)

    last = blocks.leave(b, stack.config, *layers(b, "encoder", stack, x, {"self_attn": attend}))
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
    """Build a step: tokens, positions int64 [R] -> codes int8 [R, H] for the projection onto the
    vocabulary, and their scale.

    Further inputs belong to CachedAttention. For every layer: `cache.<layer>`, with `lists`,
    `lengths`, `owned` for all layers. In translation also `encoder_out.<layer>` and
    `encoder_scale.<layer>`, with `encoder_lists`, `encoder_lengths`, `sentence`. Sizes of caches,
    lists and lengths, declared as 1 here, may be any.
    """
    b, stack = builder_of("decoder_step", architecture, backend), architecture.decoder
    config, hidden = stack.config, stack.config.hidden
    x = embedded(b, architecture, "decoder", rows)

    def indices(lists: str, lengths: str, owned: str) -> dict[str, VirtualTensor]:
        return {
            "lists": b.input(lists, (1, 1), torch.int64),
            "lengths": b.input(lengths, (1,), torch.int64),
            "owned": b.input(owned, (rows,), torch.int64),
        }

    def attended(prefix: str, queries: Rows, **cached) -> VirtualTensor:
        context = b.result(prefix + "context", (rows, hidden), prefix + "context_clip")
        b.add(
            CachedAttention(
                queries=queries.coded.bare(), heads=config.heads, context=context.rounded, **cached
            )
        )
        return b.project(
            context.rows,
            prefix + "out_weight",
            (hidden, hidden),
            Epilogue(name=prefix + "out"),
            bias=blocks.bias_of(config, prefix + "out"),
        ).floats

    own = indices("lists", "lengths", "owned")

    def attend(index: int, values: Rows) -> VirtualTensor:
        prefix = f"decoder.layers.{index}.self_attn."
        qkv = blocks.project_heads(b, config, values, prefix + "qkv", 3)
        cache = b.input(f"cache.{index}", (1, 2 * hidden), torch.int8)
        return attended(prefix, qkv, cache=cache, cache_scale=qkv.scale, appends=True, **own)

    attentions = {"self_attn": attend}
    if architecture.encoder is not None:
        of_encoder = indices("encoder_lists", "encoder_lengths", "sentence")

        def attend_to_encoder(index: int, values: Rows) -> VirtualTensor:
            prefix = f"decoder.layers.{index}.encoder_attn."
            queries = blocks.project_heads(b, config, values, prefix + "query", 1)
            cache = b.input(f"encoder_out.{index}", (1, 2 * hidden), torch.int8)
            scale = b.input(f"encoder_scale.{index}", (1,))
            return attended(
                prefix, queries, cache=cache, cache_scale=scale, appends=False, **of_encoder
            )

        attentions["encoder_attn"] = attend_to_encoder
    residual, update, norm = layers(b, "decoder", stack, x, attentions)
    if config.pre_norm and not stack.final_norm:
        last = blocks.leave(b, config, residual, update, norm)
        coded = b.round(last, PROJECTION_CLIP).coded
    else:
        names = {"own": norm, "following": "decoder.layer_norm", "clip": PROJECTION_CLIP}
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
    attentions: Mapping[str, Callable[[int, Rows], VirtualTensor]],
) -> tuple[Residual, VirtualTensor, str]:
    """Add all layers of a stack; return (the residual of the last block, its update, its norm).

    Between two layers one operation adds, normalises and rounds, as between two blocks of a layer.
    `attentions`: name -> function that adds a layer's attention, given the layer's index and input.
    """
    config, residual, update, own = stack.config, None, None, ""

    def feed_forward(index: int, rows: Rows) -> VirtualTensor:
        return blocks.feed_forward(b, config, rows, f"{side}.layers.{index}.feed_forward.")

    for index in range(stack.layers):
        for name, add in {**attentions, "feed_forward": feed_forward}.items():
            prefix = f"{side}.layers.{index}."
            norm = prefix + ("final" if name == "feed_forward" else name) + "_layer_norm"
            clip = f"{prefix}{name}.input_clip"
            if residual is None:
                residual = blocks.enter(b, config, x, norm, clip)
            else:
                residual = blocks.between(
                    b, config, residual, update, own=own, following=norm, clip=clip
                )
            own, update = norm, add(index, residual.rows)
    return residual, update, own
