"""Decoding one word at a time: programs of one step, and the state of layers between steps.

B sentences, P steps so far, H hidden size, S rows of encoder output, K columns of keys, W columns
of queries, keys and values together.
"""

import torch

from lsq.config import LayerConfig
from lsq.layers import blocks
from lsq.layers.blocks import Memory, PackedSequences
from lsq.layers.builder import LayerBuilder, Mode, cached
from lsq.layers.module import ProgramModule
from lsq.layers.positions import position_bias, position_inputs
from lsq.layers.programs import before_cross_attention, finish_with_feed_forward, packed
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Rows
from lsq.run.backends import Backend

State = dict[str, torch.Tensor]
"""Tensors kept between steps: "history" [B, P, W] has queries, keys and values. A layer with
cross-attention also keeps "cross" [B, S, 2K] and, in int8, "cross_scale" [1]."""


def reorder(state: State, order: torch.Tensor) -> None:
    """Select the sentences with indices `order` int64 [B'] in a state, in place."""
    for name in state.keys() - {"cross_scale"}:
        state[name] = state[name].index_select(0, order)


def check_ready(layer: ProgramModule) -> None:
    """Raise a ValueError for a layer in training mode, in floats, or with clips never measured."""
    if layer.training:
        raise ValueError("incremental decoding needs eval mode; call .eval() first")
    if layer.schedule.float_fallback:
        raise ValueError(
            "this layer went on in floats, since lsq.monitor found too much noise in it;"
            " incremental decoding is in int8: run it on whole targets, or set"
            " schedule.float_fallback = False to decode with that noise"
        )
    if layer.quant.quantized and not layer.schedule.calibrated:
        raise ValueError(
            "incremental decoding needs clips that have been measured: load a trained checkpoint,"
            " train for an update after lsq convert-checkpoint, or run the layer once on a whole"
            " target"
        )


def step_inputs(
    state: State, x: torch.Tensor, config: LayerConfig, backend: Backend
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return P and the inputs of one step's program, by name, for x float32 [B, H]."""
    batch, width = x.shape[0], config.query_columns + 2 * config.key_columns
    if "history" not in state:
        state["history"] = x.new_empty(batch, 0, width, dtype=codes_dtype(config))
    past = state["history"].shape[1]
    each = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    cu_seqlens, history_cu_seqlens, positions = backend.send(
        [each, each * (past + 1), torch.full((batch,), past, device="cpu")]
    )
    return past, {
        "x": x,
        "cu_seqlens": cu_seqlens,
        "history": state["history"].reshape(batch * past, width),
        "history_cu_seqlens": history_cu_seqlens,
        **position_inputs(config, positions, past + 1, causal=True),
    }


def keep_history(state: State, history: torch.Tensor) -> None:
    """Store the history [B * (P + 1), W] that a step returned in the state."""
    state["history"] = history.view(len(state["history"]), -1, history.shape[1])


def codes_dtype(config: LayerConfig) -> torch.dtype:
    """Return the dtype of kept keys and values: int8 codes, or floats if nothing is coded."""
    return torch.int8 if config.quant.coded else torch.float32


@cached
def encoder_step(config: LayerConfig, past: int, batch: int, mode: Mode) -> Program:
    """One step of a causal encoder layer: x [B, H], history [B * P, W] -> x and the new history."""
    b = mode.builder("encoder_step", config.quant)
    x, cu_seqlens = packed(b, PackedSequences(rows=batch, count=batch), config)
    residual = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    update, every = _attend_to_history(b, config, residual.rows, cu_seqlens, past)
    finish_with_feed_forward(b, config, residual, update, "self_attn_layer_norm")
    b.output(every.tensor)
    return b.build()


@cached
def decoder_memory(config: LayerConfig, rows: int, mode: Mode) -> Program:
    """Keys and values of cross-attention: memory [S, H] -> [S, 2K], and the scale of its codes."""
    b = mode.builder("decoder_memory", config.quant)
    memory = b.input("memory", (rows, config.hidden))
    found = blocks.project_memory(b, config, memory, "encoder_attn.")
    b.output(found.tensor)
    if config.quant.coded:
        b.output(found.scale)
    return b.build()


@cached
def decoder_step(config: LayerConfig, past: int, source: PackedSequences, mode: Mode) -> Program:
    """One step of a decoder layer; `cross` [S, 2K] comes from decoder_memory."""
    b = mode.builder("decoder_step", config.quant)
    batch = source.count
    x, cu_seqlens = packed(b, PackedSequences(rows=batch, count=batch), config)
    cross = b.input("cross", (source.rows, 2 * config.key_columns), codes_dtype(config))
    cross_scale = b.input("cross_scale", (1,)) if config.quant.coded else None
    source_cu_seqlens = source.cu_seqlens(b, "source_cu_seqlens")
    residual = blocks.enter(b, config, x, "self_attn_layer_norm", "self_attn.input_clip")
    update, every = _attend_to_history(b, config, residual.rows, cu_seqlens, past)
    residual = before_cross_attention(b, config, residual, update)
    rows = b.kept_rows(cross, cross_scale)
    memory = Memory(rows=rows, key_column=0, cu_seqlens=source_cu_seqlens)
    update = blocks.cross_attention(b, config, residual.rows, cu_seqlens, memory, "encoder_attn.")
    finish_with_feed_forward(b, config, residual, update, "encoder_attn_layer_norm")
    b.output(every.tensor)
    return b.build()


def _attend_to_history(
    b: LayerBuilder, config: LayerConfig, rows: Rows, cu_seqlens: VirtualTensor, past: int
) -> tuple[VirtualTensor, Rows]:
    """Attend from one word of each sentence: (floats [B, H], new history [B * (P + 1), W])."""
    batch, width = rows.tensor.shape[0], config.query_columns + 2 * config.key_columns
    history = b.input("history", (batch * past, width), codes_dtype(config))
    all_cu_seqlens = b.input("history_cu_seqlens", (batch + 1,), torch.int32)
    qkv = blocks.project_heads(b, config, rows, "self_attn.qkv", 3)
    every = blocks.append(b, history, qkv, batch)
    memory = Memory(rows=every, key_column=config.query_columns, cu_seqlens=all_cu_seqlens)
    options = {"window": config.window, "bias": position_bias(b, config, "self_attn.")}
    update = blocks.attention(b, config, qkv, cu_seqlens, memory, "self_attn.", **options)
    return update, every
