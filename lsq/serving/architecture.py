"""The architecture of a decoding model: enough to name its tensors, with their shapes, and to
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
"""Fields of LayerConfig for models of others, which cannot be decoded here; files leave them out.
"""
OF_TRAINING = ("sparsity", "adapters")
"""Fields that say how a model goes on learning; files leave them out, too."""
ADDED = {"gated": False, "bias": True}
"""Fields that older files of a LayerConfig lack."""
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
    """Factor of the rows of words."""
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
        """Rows of the codes of a projection onto the words."""
        return -(-self.words // DIMENSION_MULTIPLE) * DIMENSION_MULTIPLE


def check_codes(quant: QuantConfig) -> None:
    """Refuse a model that cannot be kept as codes.

    Raises:
        ValueError: it is in floats, or has formats without fast products, or several; the message
            names all, as they were given.
    """
    if quant.coded and not quant.formats_differ:
        return
    formats = (
        f"weights in {quant.weight_format}, activations in {quant.activation_format}, gradients in"
        f" {quant.gradient_format}"
    )
    raise ValueError(
        (formats if quant.quantized else 'mode is "float"')
        + '; only models in int8 are kept as codes: train with mode "int8" and fast formats, or'
        " make checkpoints of others into such by lsq convert-checkpoint"
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
    """Whether encoder and decoder share the decoder's table of words."""
    tied_projection: bool
    """Whether the projection onto the vocabulary was trained as the decoder's table of words."""
    padding: int
    """The word that fills sentences up; positions count from behind its number."""
    bos: int
    eos: int
    """The end of a sentence, which decoding begins with."""
    unk: int

    def __post_init__(self) -> None:
        encoder, decoder = self.encoder, self.decoder
        words = decoder.words if encoder is None else min(encoder.words, decoder.words)
        for name in ("padding", "bos", "eos", "unk"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < words:
                raise ValueError(f"{name} is {value!r}; it must be one of {words} words")
        if encoder is None:
            if self.shared_words:
                raise ValueError(
                    "shared_words is True, but there is no encoder to share words with"
                )
            return
        if encoder.config.hidden != decoder.config.hidden:
            raise ValueError(
                f"the encoder is {encoder.config.hidden} wide and the decoder"
                f" {decoder.config.hidden}; both must be equal"
            )
        if encoder.config.quant != decoder.config.quant:
            raise ValueError(
                "encoder and decoder are rounded in different ways; both must have one QuantConfig"
            )
        if self.shared_words and encoder.words != decoder.words:
            raise ValueError(
                f"the encoder has {encoder.words} words and the decoder {decoder.words}; those"
                " cannot be shared"
            )

    @property
    def stacks(self) -> dict[str, StackArchitecture]:
        """Encoder, if there is one, and decoder, by name."""
        encoder = {} if self.encoder is None else {"encoder": self.encoder}
        return encoder | {"decoder": self.decoder}

    def to_json(self) -> str:
        """Return text that `from_json` reads."""
        left_out = (*OF_OTHERS, *OF_TRAINING)

        def written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if name not in left_out}

        return json.dumps(asdict(self, dict_factory=written), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Architecture":
        """Return the architecture that was written.

        Raises:
            ValueError: the text is no architecture.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the architecture is no JSON: {error}") from error
        return _read(Architecture, value, "architecture")


CLASSES = {
    "config": LayerConfig,
    "quant": QuantConfig,
    "encoder": StackArchitecture,
    "decoder": StackArchitecture,
}
"""Classes of the fields that are dataclasses."""


def _read(cls: type, value: Any, where: str) -> Any:
    """Make an instance of a dataclass from parsed JSON, with every field, each of its type."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.80}; it must be an object")
    value = (ADDED if cls is LayerConfig else {}) | value
    kept = [field for field in fields(cls) if field.name not in (*OF_OTHERS, *OF_TRAINING)]
    names = {field.name for field in kept}
    for problem, different in (("lacks", names - set(value)), ("has unknown", set(value) - names)):
        if different:
            raise ValueError(
                f"{where} {problem} {', '.join(sorted(different))}; it was written by another"
                " version of lsq"
            )
    values = {}
    for field in kept:
        item, kind = value[field.name], CLASSES.get(field.name, field.type)
        name = f"{where}.{field.name}"
        if item is None and field.name == "encoder":
            values[field.name] = None
        elif is_dataclass(kind):
            values[field.name] = _read(kind, item, name)
        elif type(item) is kind or kind is float and type(item) is int:
            values[field.name] = kind(item)
        else:
            raise ValueError(f"{name} is {item!r:.80}; it must be of type {kind.__name__}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
