"""The architecture of a decoding model: enough to name its tensors, with their shapes, and to
compute with them."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from lsq.config import LayerConfig, QuantConfig, require_choice
from lsq.config.quantization import RENAMED, of_trained
from lsq.layers.embedding import POSITIONS

OF_OTHERS = """
    kv_heads head_width softmax_scale window rotary qk_norm relative_bias head_bias in_out
""".split()
"""Fields of LayerConfig for models of others, which cannot be decoded here."""
LEFT_OUT = (*OF_OTHERS, "sparsity", "adapters")
"""Fields that files leave out: also those that say how a model goes on learning."""
ADDED = {"gated": False, "bias": True}
"""Fields that older files of a LayerConfig lack."""
MOST = 2**24
"""Words or positions of a stack, at most, and LAYERS: a file asks for no more memory and time."""
LAYERS = 2**10


@dataclass(frozen=True, kw_only=True)
class StackArchitecture:
    """An encoder or a decoder: embedding, layers, final norm; ValueError if a value is out of its
    range, or the layers are not in int8."""

    config: LayerConfig  # of each layer; dropout does not count
    layers: int
    words: int
    max_positions: int
    """Words of the longest sentence, its end included."""
    positions: str
    """"sinusoidal" or "learned"."""
    embedding_scale: float
    """Factor of the rows of words."""
    embedding_norm: bool
    """Whether a LayerNorm follows the sum of words and positions."""
    final_norm: bool

    def __post_init__(self) -> None:
        for name, most in (("layers", LAYERS), ("words", MOST), ("max_positions", MOST)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a whole number from 1 to {most}"
                )
        require_choice("positions", self.positions, POSITIONS)
        if self.final_norm and not self.config.pre_norm:
            raise ValueError(
                "final_norm is True under post-norm, whose last layer ends with a norm of its own"
            )
        for field in fields(self.config):
            value = getattr(self.config, field.name)
            if field.name in OF_OTHERS and value != field.default:
                raise ValueError(
                    f"{field.name} is {value!r}; models that are kept as codes decode without:"
                    " leave it out"
                )
        check_codes(self.config.quant)


def check_codes(quant: QuantConfig) -> None:
    """Raise ValueError for a model that is not kept as codes: it is in floats, or has several
    formats, or formats without fast products."""
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
    """A translation model, or a language model: the same without an encoder."""

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

    @property
    def stacks(self) -> dict[str, StackArchitecture]:
        """Encoder, if there is one, and decoder, by name."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {side: stack for side, stack in both.items() if stack is not None}

    def to_json(self) -> str:
        """Return text that `from_json` reads."""

        def written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if name not in LEFT_OUT}

        return json.dumps(asdict(self, dict_factory=written), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Architecture":
        """Return the architecture that was written; ValueError if the text is no architecture."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the architecture is no JSON: {error}") from error
        return _read(Architecture, value, "architecture")


CLASSES = {"config": LayerConfig, "quant": QuantConfig}
CLASSES |= dict.fromkeys(("encoder", "decoder"), StackArchitecture)
"""Classes of the fields that are dataclasses."""


def _read(cls: type, value: Any, where: str) -> Any:
    """Make an instance of a dataclass from parsed JSON, with every field, each of its type."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.80}; it must be an object")
    value = (ADDED if cls is LayerConfig else {}) | value
    if cls is QuantConfig:
        texts = {name: str(value[name]) for name in RENAMED.keys() & value.keys()}
        value = of_trained(value | texts, goes_on=False)
    types = {field.name: field.type for field in fields(cls) if field.name not in LEFT_OUT}
    for problem, names in (("lacks", types.keys() - value), ("has unknown", value.keys() - types)):
        if names:
            raise ValueError(
                f"{where} {problem} {', '.join(sorted(names))}; it was written by another version"
                " of lsq"
            )
    values = {}
    for name, kind in types.items():
        item, path = value[name], f"{where}.{name}"
        if name in CLASSES:
            without = item is None and name == "encoder"
            values[name] = None if without else _read(CLASSES[name], item, path)
        elif type(item) is kind or kind is float and type(item) is int:
            values[name] = kind(item)
        else:
            raise ValueError(f"{path} is {item!r:.80}; it must be of type {kind.__name__}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
