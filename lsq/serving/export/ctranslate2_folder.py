"""A folder that CTranslate2 loads (OpenNMT/CTranslate2, version 4.8), with the codes and scales of
the weights as they were learned: nothing that lsq has rounded is rounded again.

CTranslate2 rounds activations by each row's largest value, where lsq has one clip for the rows of
most tensors, and
it wants the tables of words in int8: those, floats in lsq, are rounded here as its own converters
do. So scores differ a little; docs/exporting.md has measured how much. V words, N outputs, K
inputs, H hidden, F feed-forward.
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from lsq import extras, files
from lsq.layers.embedding import sinusoidal_table
from lsq.serving.decode.architecture import Architecture, StackArchitecture
from lsq.serving.decode.model import EMBEDDING, PROJECTION, DecodingModel

PADDING = "<blank>"
"""CTranslate2's name of the padding; <s>, </s> and <unk> are as fairseq has them."""
MODEL, SUBWORDS = "model.bin", "sentencepiece.model"
"""Files in the folder."""
LARGEST = numpy.float32(127.0)
EPSILON = 1e-5
"""Of LayerNorm, in CTranslate2."""


def specifications() -> ModuleType:
    """CTranslate2's descriptions of models.

    Raises:
        MissingPackage: the package is not installed.
    """
    extras.require("exporting to CTranslate2", "ctranslate2")
    import ctranslate2.specs

    return ctranslate2.specs


def write(
    folder: Path,
    model: DecodingModel,
    source: Sequence[str] | None,
    target: Sequence[str],
    *,
    subwords: bytes | None = None,
) -> None:
    """Write model.bin, config.json and the vocabularies, all or nothing; a folder that is there is
    replaced.

    Args:
        folder: where to.
        model: what to write.
        source: the words by number, special ones as fairseq names them; None for a language model.
        target: the same of what is generated.
        subwords: sentencepiece's model, which is written beside them.

    Raises:
        ValueError: the package is not installed, or cannot compute this model.
        OSError: it cannot be written.
    """
    spec = specification(model, source, target)

    def make(made: Path) -> None:
        spec.save(str(made))
        if subwords is not None:
            (made / SUBWORDS).write_bytes(subwords)

    files.write_folder(folder, make)


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a model of CTranslate2."""
    return (folder / MODEL).is_file()


def specification(model: DecodingModel, source: Sequence[str] | None, target: Sequence[str]) -> Any:
    """CTranslate2's specification of the model, filled and validated.

    Raises:
        ValueError: see `write`; or the words do not fit the model.
    """
    architecture, specs = model.architecture, specifications()
    decoder = specs.TransformerDecoderSpec(
        with_encoder_attention=architecture.encoder is not None,
        **_options(specs, architecture.decoder),
    )
    if architecture.encoder is None:
        made = specs.TransformerDecoderModelSpec(decoder)
        made.register_vocabulary(_words(target, architecture))
        made.config.bos_token = made.config.eos_token
    else:
        encoder = specs.TransformerEncoderSpec(**_options(specs, architecture.encoder))
        made = specs.TransformerSpec(encoder, decoder)
        made.register_source_vocabulary(_words(source, architecture))
        made.register_target_vocabulary(_words(target, architecture))
        made.config.decoder_start_token = made.config.eos_token
        made.config.add_source_eos = True
        _Stack(model, "encoder").fill(encoder)
    _Stack(model, "decoder").fill(decoder)
    made.validate()
    made.optimize()  # equal tables are stored once
    return made


def _options(specs: ModuleType, stack: StackArchitecture) -> dict[str, Any]:
    """What the specifications of encoder and decoder take."""
    config = stack.config
    if config.norm != "layer" or config.layer_norm_epsilon != EPSILON:
        raise ValueError(
            f"norm is {config.norm!r} with an epsilon of {config.layer_norm_epsilon}; a model for"
            " CTranslate2 must have"
            f" 'layer' with {EPSILON}"
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


def _words(words: Sequence[str], architecture: Architecture) -> list[str]:
    return [
        PADDING if number == architecture.padding else word for number, word in enumerate(words)
    ]


class _Stack:
    """An encoder or a decoder of a model, to fill CTranslate2's specification of it."""

    def __init__(self, model: DecodingModel, side: str):
        self.model, self.side = model, side
        self.stack = model.architecture.stacks[side]

    def fill(self, spec: Any) -> None:
        """All of it."""
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
        """A layer whose tensors' names begin with `name`."""
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
        """A weight [N, K] and its bias [N]."""
        self.weight(spec, name + "_weight", inputs)
        spec.bias = self.tensor(name + "_bias")

    def weight(self, spec: Any, name: str, inputs: int, rows: int | None = None) -> None:
        """The first `rows` of a rounded weight. CTranslate2 divides codes by its scales."""
        spec.weight = self.model.codes(f"{self.side}.{name}", inputs)[:rows].numpy()
        spec.weight_scale = 1 / self.tensor(name + ".scale")[:rows]

    def norm(self, spec: Any, name: str) -> None:
        spec.gamma, spec.beta = self.tensor(name + ".weight"), self.tensor(name + ".bias")

    def positions(self) -> numpy.ndarray:
        """float32 [max_positions, H]; the first word of a sentence has the first row."""
        first = self.model.architecture.padding + 1
        if self.stack.positions == "learned":
            return self.tensor(f"{EMBEDDING}.position_weight")[first:]
        table = sinusoidal_table(
            first + self.stack.max_positions, self.stack.config.hidden, first - 1
        )
        return table[first:].numpy()

    def tensor(self, name: str) -> numpy.ndarray:
        """A tensor of this stack."""
        return self.model.tensors[f"{self.side}.{name}"].numpy()


def rounded_rows(table: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """float32 [V, H] -> (codes int8 [V, H], scales float32 [V]), as CTranslate2 does: the largest
    is 127."""
    largest = numpy.abs(table).max(axis=1)
    scale = LARGEST / numpy.where(largest == 0, LARGEST, largest)
    return numpy.rint(table * scale[:, None]).astype(numpy.int8), scale
