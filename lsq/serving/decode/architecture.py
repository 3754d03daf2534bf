"""What a model is, apart from its tensors: enough to name each of them, with its shape, and to
compute with them."""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from lsq.config import (
    DIMENSION_MULTIPLE,
    LayerConfig,
    QuantConfig,
    require_choice,
    require_positive,
)
from lsq.layers.embedding import POSITIONS

OF_OTHERS = (
    "kv_heads",
    "head_width",
    "softmax_scale",
    "window",
    "rotary",
    "qk_norm",
    "relative_bias",
    "head_bias",
    "in_out",
)
"""What a LayerConfig may say of models of others, which no decoder of codes knows; files leave it
out."""
MOST = 2**24
"""Words or positions of a stack, at most: a damaged file asks for no more memory than that."""
MOST_LAYERS = 1024
"""Of a stack: each takes time before the first tensor is looked at."""


@dataclass(frozen=True, kw_only=True)
class StackArchitecture:
    """An encoder or a decoder: embedding, layers, final norm.

    Raises:
        ValueError: a value is out of its range, or the layers are not in int8.
    """

    config: LayerConfig
    """Of each layer; dropout does not count."""
    layers: int
    words: int
    """V"""
    max_positions: int
    """Words of the longest sentence, its end included."""
    positions: str
    """"sinusoidal" or "learned"."""
    embedding_scale: float
    """What rows of words are multiplied by."""
    embedding_norm: bool
    """Whether a LayerNorm follows the sum of words and positions."""
    final_norm: bool
    """Whether a norm follows the last layer."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("layers", 1, MOST_LAYERS),
            ("words", 2, MOST),
            ("max_positions", 1, MOST),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most}"
                )
        require_choice("positions", self.positions, POSITIONS)
        require_positive("embedding_scale", self.embedding_scale)
        if self.final_norm and not self.config.pre_norm:
            raise ValueError(
                "final_norm is True under post-norm, whose last layer ends with a norm of its own"
            )
        for field in fields(self.config):
            name, value = field.name, getattr(self.config, field.name)
            if name in OF_OTHERS and value != field.default:
                raise ValueError(
                    f"{name} is {value!r}; models that are kept as codes decode without: leave it"
                    " out"
                )
        check_codes(self.config.quant)

    @property
    def padded_words(self) -> int:
        """P, rows of a projection's codes onto the words."""
        return -(-self.words // DIMENSION_MULTIPLE) * DIMENSION_MULTIPLE


def check_codes(quant: QuantConfig) -> None:
    """Refuse a model that cannot be kept as codes.

    Raises:
        ValueError: it is in floats, or has formats without fast products, or several; names all, as
            they were given.
    """
    if quant.coded and not quant.formats_differ:
        return
    formats = (
        f"weights in {quant.weight_format}, activations in {quant.activation_format}, gradients in "
    )
    found = formats + quant.gradient_format if quant.quantized else 'mode is "float"'
    raise ValueError(
        f'{found}; only models in int8 are kept as codes: train with mode "int8" and fast formats,'
        " or make checkpoints "
        "of others into such by lsq convert-checkpoint"
    )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A translation model, or a language model: the same without an encoder.

    Raises:
        ValueError: a value is out of its range, or two do not go together.
    """

    encoder: StackArchitecture | None
    decoder: StackArchitecture
    shared_words: bool
    """Whether encoder and decoder look words up in one table, which then is the decoder's."""
    tied_projection: bool
    """Whether the projection onto the vocabulary was trained as the decoder's table of words."""
    padding: int
    """The word that fills sentences up; positions count from behind its number."""
    bos: int
    eos: int
    """The end of a sentence, and what decoding begins with."""
    unk: int

    def __post_init__(self) -> None:
        words = (
            self.decoder.words
            if self.encoder is None
            else min(self.encoder.words, self.decoder.words)
        )
        for name in ("padding", "bos", "eos", "unk"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < words:
                raise ValueError(f"{name} is {value!r}; it must be one of {words} words")
        if self.encoder is None:
            if self.shared_words:
                raise ValueError(
                    "shared_words is True, but there is no encoder to share words with"
                )
            return
        if self.encoder.config.hidden != self.decoder.config.hidden:
            raise ValueError(
                f"the encoder is {self.encoder.config.hidden} wide and the decoder"
                f" {self.decoder.config.hidden}; "
                "both must be equal"
            )
        if self.encoder.config.quant != self.decoder.config.quant:
            raise ValueError(
                "encoder and decoder are rounded in different ways; both must have one QuantConfig"
            )
        if self.shared_words and self.encoder.words != self.decoder.words:
            raise ValueError(
                f"the encoder has {self.encoder.words} words and the decoder {self.decoder.words};"
                " those cannot be "
                "shared"
            )

    @property
    def stacks(self) -> dict[str, StackArchitecture]:
        """Encoder, if there is one, and decoder, by name."""
        return ({} if self.encoder is None else {"encoder": self.encoder}) | {
            "decoder": self.decoder
        }

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps(asdict(self, dict_factory=_written), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Architecture":
        """The architecture that was written.

        Raises:
            ValueError: the text is not one.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the architecture is no JSON: {error}") from error
        return _read(Architecture, value, "architecture")


KINDS = {
    "config": LayerConfig,
    "quant": QuantConfig,
    "encoder": StackArchitecture,
    "decoder": StackArchitecture,
}
"""Fields that hold others."""
OF_TRAINING = ("sparsity", "adapters")
"""Fields that say how a model goes on learning; files leave them out, too."""
OPTIONAL = ("encoder",)
ADDED = {"gated": False, "bias": True}
"""What the layers of older files are."""


def _written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What is written of a dataclass, as names and values."""
    return {name: value for name, value in pairs if name not in (*OF_OTHERS, *OF_TRAINING)}


def _read(cls: type, value: Any, where: str) -> Any:
    """An instance of that dataclass from parsed JSON, with every field there and of its type.

    LayerConfig may lack fields that have come since: their defaults compute what there was before.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.80}; it must be an object")
    value = (ADDED if cls is LayerConfig else {}) | value
    kept = [field for field in fields(cls) if field.name not in (*OF_OTHERS, *OF_TRAINING)]
    names = [field.name for field in kept]
    for problem, found in (
        ("lacks", set(names) - set(value)),
        ("has unknown", set(value) - set(names)),
    ):
        if found:
            raise ValueError(
                f"{where} {problem} {', '.join(sorted(found))}; it was written by another version"
                " of lsq"
            )
    given = {}
    for field in kept:
        one, kind, name = (
            value[field.name],
            KINDS.get(field.name, field.type),
            f"{where}.{field.name}",
        )
        if one is None and field.name in OPTIONAL:
            given[field.name] = None
        elif is_dataclass(kind):
            given[field.name] = _read(kind, one, name)
        elif type(one) is kind or kind is float and type(one) is int:
            given[field.name] = kind(one)
        else:
            raise ValueError(f"{name} is {one!r:.80}; it must be of type {kind.__name__}")
    try:
        return cls(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
