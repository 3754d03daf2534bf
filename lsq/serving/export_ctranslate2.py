"""Export to a folder for CTranslate2 (OpenNMT/CTranslate2, version 4.8).

The codes and scales of weights stay as trained. CTranslate2 rounds activations by the largest value
of each row; lsq has one clip for all rows of most tensors. CTranslate2 also wants tables of words
in int8: lsq's floats are rounded here as its own converters do. So scores differ a little;
docs/serving.md has measurements. V words, N outputs, K inputs, H hidden.
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from lsq import extras, files
from lsq.layers.embedding import sinusoidal_table
from lsq.serving.architecture import StackArchitecture
from lsq.serving.decoding_model import EMBEDDING, PROJECTION, DecodingModel

PADDING = "<blank>"
"""CTranslate2's name of the padding; <s>, </s> and <unk> are as fairseq has them."""
MODEL, SUBWORDS = "model.bin", "sentencepiece.model"
"""Files in the folder."""
LARGEST = numpy.float32(127.0)
EPSILON = 1e-5
"""Epsilon of CTranslate2's LayerNorm."""


def write(
    folder: Path,
    model: DecodingModel,
    source: Sequence[str] | None,
    target: Sequence[str],
    *,
    subwords: bytes | None = None,
) -> None:
    """Write model.bin, config.json and the vocabularies, all or nothing; replaces a folder.

    Args:
        source: source words by number, special words as in fairseq; None for a language model.
        target: target words by number.
        subwords: content of sentencepiece's model, which is written beside them.

    Raises:
        MissingPackage: CTranslate2 is not installed.
        ValueError: CTranslate2 cannot compute this model.
        OSError: the folder cannot be written.
    """
    spec = specification(model, source, target)

    def make(made: Path) -> None:
        spec.save(str(made))
        if subwords is not None:
            (made / SUBWORDS).write_bytes(subwords)

    files.write_folder(folder, make)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder holds a model of CTranslate2."""
    return (folder / MODEL).is_file()


def specification(model: DecodingModel, source: Sequence[str] | None, target: Sequence[str]) -> Any:
    """Make CTranslate2's specification, filled and validated; raises as `write`, and ValueError if
    the words do not fit the model."""
    extras.require("exporting to CTranslate2", "ctranslate2")
    from ctranslate2 import specs

    architecture = model.architecture

    def named(words: Sequence[str]) -> list[str]:
        padding = architecture.padding
        return [PADDING if number == padding else word for number, word in enumerate(words)]

    decoder = specs.TransformerDecoderSpec(
        with_encoder_attention=architecture.encoder is not None,
        **_options(specs, architecture.decoder),
    )
    if architecture.encoder is None:
        made = specs.TransformerDecoderModelSpec(decoder)
        made.register_vocabulary(named(target))
        made.config.bos_token = made.config.eos_token
    else:
        encoder = specs.TransformerEncoderSpec(**_options(specs, architecture.encoder))
        made = specs.TransformerSpec(encoder, decoder)
        made.register_source_vocabulary(named(source))
        made.register_target_vocabulary(named(target))
        made.config.decoder_start_token = made.config.eos_token
        made.config.add_source_eos = True
        _Stack(model, "encoder").fill(encoder)
    _Stack(model, "decoder").fill(decoder)
    made.validate()
    made.optimize()  # equal tables are stored once
    return made


def _options(specs: ModuleType, stack: StackArchitecture) -> dict[str, Any]:
    config = stack.config
    if config.norm != "layer" or config.layer_norm_epsilon != EPSILON:
        raise ValueError(
            f"norm is {config.norm!r} with an epsilon of {config.layer_norm_epsilon}; a model for"
            f" CTranslate2 must have 'layer' with {EPSILON}"
        )
    activations = {
        "relu": specs.Activation.RELU,
        "gelu": specs.Activation.GELU,
        "gelu_tanh": specs.Activation.GELUTanh,
        "silu": specs.Activation.SWISH,
    }
    if config.gated or not config.bias:
        raise ValueError(
            f"gated is {config.gated} and bias {config.bias}; a model for CTranslate2 must have"
            " False and True"
        )
    if config.activation not in activations:
        raise ValueError(
            f"activation is {config.activation!r}; CTranslate2 knows: {', '.join(activations)}"
        )
    return {
        "num_layers": stack.layers,
        "num_heads": config.heads,
        "pre_norm": config.pre_norm,
        "no_final_norm": not stack.final_norm,
        "activation": activations[config.activation],
        "layernorm_embedding": stack.embedding_norm,
    }


class _Stack:
    """Fills CTranslate2's specification of an encoder or a decoder."""

    def __init__(self, model: DecodingModel, side: str):
        self.model, self.side = model, side
        self.stack = model.architecture.stacks[side]

    def fill(self, spec: Any) -> None:
        hidden = self.stack.config.hidden
        table = spec.embeddings[0] if self.side == "encoder" else spec.embeddings
        table.weight, table.weight_scale = rounded_rows(self.model.words(self.side).numpy())
        spec.scale_embeddings = self.stack.embedding_scale
        spec.position_encodings.encodings = self.positions()
        if self.stack.embedding_norm:
            self.norm(spec.layernorm_embedding, f"{EMBEDDING}.layer_norm")
        if self.stack.final_norm:
            self.norm(spec.layer_norm, "layer_norm")
        for index, layer in enumerate(spec.layer):
            self.layer(layer, f"layers.{index}.", hidden)
        if self.side == "decoder":
            self.weight(spec.projection, f"{PROJECTION}.weight", hidden, rows=self.stack.words)

    def layer(self, spec: Any, name: str, hidden: int) -> None:
        attention = spec.self_attention
        self.linear(attention.linear[0], name + "self_attn.qkv", hidden)
        self.linear(attention.linear[1], name + "self_attn.out", hidden)
        self.norm(attention.layer_norm, name + "self_attn_layer_norm")
        if hasattr(spec, "attention"):
            for linear, part in zip(
                spec.attention.linear, ("query", "key_value", "out"), strict=True
            ):
                self.linear(linear, f"{name}encoder_attn.{part}", hidden)
            self.norm(spec.attention.layer_norm, name + "encoder_attn_layer_norm")
        self.linear(spec.ffn.linear_0, name + "feed_forward.fc1", hidden)
        self.linear(spec.ffn.linear_1, name + "feed_forward.fc2", self.stack.config.feed_forward)
        self.norm(spec.ffn.layer_norm, name + "final_layer_norm")

    def linear(self, spec: Any, name: str, inputs: int) -> None:
        self.weight(spec, name + "_weight", inputs)
        spec.bias = self.tensor(name + "_bias")

    def weight(self, spec: Any, name: str, inputs: int, rows: int | None = None) -> None:
        """Set the first `rows` rows of a rounded weight. CTranslate2 divides codes by scales."""
        spec.weight = self.model.codes(f"{self.side}.{name}", inputs)[:rows].numpy()
        spec.weight_scale = 1 / self.tensor(name + ".scale")[:rows]

    def norm(self, spec: Any, name: str) -> None:
        spec.gamma, spec.beta = self.tensor(name + ".weight"), self.tensor(name + ".bias")

    def positions(self) -> numpy.ndarray:
        """Return float32 [max_positions, H], positions from the first word of a sentence on."""
        first = self.model.architecture.padding + 1
        if self.stack.positions == "learned":
            return self.tensor(f"{EMBEDDING}.position_weight")[first:]
        table = sinusoidal_table(
            first + self.stack.max_positions, self.stack.config.hidden, first - 1
        )
        return table[first:].numpy()

    def tensor(self, name: str) -> numpy.ndarray:
        return self.model.tensors[f"{self.side}.{name}"].numpy()


def rounded_rows(table: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Round float32 [V, H] as CTranslate2 does; return (codes int8 [V, H], scales float32 [V]). The
    largest magnitude of a row times its scale is 127."""
    largest = numpy.abs(table).max(axis=1)
    scale = LARGEST / numpy.where(largest == 0, LARGEST, largest)
    return numpy.rint(table * scale[:, None]).astype(numpy.int8), scale
