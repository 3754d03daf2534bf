"""Architecture of a decoding model: it determines the tensors, their shapes and the programs."""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lsq.config import LayerConfig, QuantConfig, require_choice
from lsq.config.quantization import RENAMED, of_trained
from lsq.layers.embedding import POSITIONS
from lsq.quant.formats import WeightFormat, format_choice
from lsq.serving.stored_codes import format_of

OF_OTHERS = """
    kv_heads head_width softmax_scale window rotary qk_norm relative_bias head_bias in_out
""".split()
"""Fields of LayerConfig for Hugging Face models, which cannot be decoded here."""
LEFT_OUT = (*OF_OTHERS, "sparsity", "adapters")
"""Fields that files leave out: OF_OTHERS, and fields that matter for training alone."""
ADDED = {"gated": False, "bias": True}
"""Fields of LayerConfig that older files lack -> their values."""
MOST = 2**24
"""Most words or positions of a stack, and most LAYERS: a file cannot ask for endless memory."""
LAYERS = 2**10


@dataclass(frozen=True, kw_only=True)
class StackArchitecture:
    """An encoder or a decoder: embedding, layers, final norm; ValueError if a value is out of its
    range, or the layers are not in int8."""

    config: LayerConfig
    """Of each layer; dropouts are ignored. Patterns of `weight_format` fit whole names of weights,
    which begin with the side."""
    layers: int
    words: int
    max_positions: int
    """Words of the longest sentence, its end included."""
    positions: str
    """"sinusoidal" or "learned"."""
    embedding_scale: float
    """Factor of the word embeddings."""
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


def check_codes(quant: QuantConfig, weights: str = "weights") -> None:
    """Raise ValueError, which names the `weights`, if they cannot be kept as codes: they are in
    float or in a format without fast products, or their inputs are not in int8."""
    choice = format_choice(quant.weight_format)
    for name, form in ((weights, choice.others), *choice.exceptions):
        if format_of(replace(quant, weight_format=form)) is None:
            formats = (
                f"{name} in {form}, activations in {quant.activation_format}, gradients in"
                f" {quant.gradient_format}"
            )
            raise ValueError(
                (formats if quant.quantized else 'mode is "float"')
                + "; models are kept as codes with activations in int8 and weights in int8, int4"
                " or whole numbers with a scale for each row or for the tensor, as int2/row: train"
                " such a model, or make a checkpoint into one by lsq convert-checkpoint"
            )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Architecture of a translation model, or of a language model, which has no encoder."""

    encoder: StackArchitecture | None
    decoder: StackArchitecture
    shared_words: bool
    """Whether encoder and decoder share the decoder's table of words."""
    tied_projection: bool
    """Whether the projection onto the vocabulary was trained as the decoder's table of words."""
    padding: int
    """The word that fills sentences up. The first word of a sentence has position padding + 1."""
    bos: int
    eos: int
    """The end of a sentence; decoding begins with it."""
    unk: int

    @property
    def stacks(self) -> dict[str, StackArchitecture]:
        """Encoder, if there is one, and decoder, by name."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {side: stack for side, stack in both.items() if stack is not None}

    def format_of(self, weight: str) -> WeightFormat:
        """Return the format of a weight's codes, by its whole name."""
        stack = self.stacks.get(weight.partition(".")[0], self.decoder)
        return format_of(stack.config.quant, weight)

    def to_json(self) -> str:
        """Return JSON for `from_json`, without LEFT_OUT."""

        def written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if name not in LEFT_OUT}

        return json.dumps(asdict(self, dict_factory=written), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Architecture":
        """Return the architecture in a JSON text; ValueError if the text is no architecture."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the architecture is no JSON: {error}") from error
        return _read(Architecture, value, "architecture")


CLASSES = {"config": LayerConfig, "quant": QuantConfig}
CLASSES |= dict.fromkeys(("encoder", "decoder"), StackArchitecture)
"""Field that is a dataclass -> its class."""


def _read(cls: type, value: Any, where: str) -> Any:
    """Make a dataclass from parsed JSON, which must have every field in its type, or ValueError."""
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
