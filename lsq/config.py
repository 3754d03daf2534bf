"""Configuration: frozen, keyword-only dataclasses that are checked when they are made.

Every error is a ValueError that names the value that was given and the values that are allowed.
"""

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

from lsq.quant import CALIBRATIONS, CLIP_GRADIENTS, GRADIENT, WEIGHT_FORMATS, Format, Grain, Pruning, WeightFormat
from lsq.quant.choices import check_choice, format_choice
from lsq.quant.numbers import ScaledFormat, scaled_format
from lsq.quant.pruning import check_width

MODES = ("float", "int8")
BACKWARDS = ("float", "int8")
GRANULARITIES = ("tensor", "channel")
PRODUCT_DTYPES = ("float32", "bfloat16")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "squared_relu")
NORMS = ("layer", "rms")
Names = Mapping[str, Sequence[str]]
"""What a part of a model calls a tensor -> its names in the state dict of the part."""
Fitted = dict[str, set[str]]
"""Names of fields of QuantConfig -> patterns that fit a tensor."""
FAST_FORMATS = {"weight_format": WEIGHT_FORMATS, "activation_format": ("int8",), "gradient_format": ("int8",)}
"""Field of QuantConfig -> formats that products read as they are."""
UNROUNDED = "float32"
"""What is not rounded."""
DIMENSION_MULTIPLE = 16
"""Inner dimensions of int8 products must be multiples of this (16-byte rows; as cuBLASLt and VNNI want them)."""


def require_choice(name: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def check_format(fast: Collection[str], name: str) -> None:
    """Refuse a format that does not exist.

    Raises:
        ValueError: `name` is no fast format, nor "float32", nor one of lsq.quant.numbers; the nearest is offered.
    """
    if name in (*fast, UNROUNDED):
        return
    try:
        scaled_format(name)
    except ValueError as error:
        allowed = ", ".join(map(repr, (*fast, UNROUNDED)))
        raise ValueError(f"allowed are {allowed}, and formats of docs/formats.md, but {error}") from None


def require_positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def require_whole(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")


def documentation(dataclass: type) -> dict[str, str]:
    """The docstrings that stand under the fields of `dataclass`: field name -> text, "" where there is none."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(dataclass))).body
    found = {field.name: "" for field in fields(dataclass)}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Constant):
            found[statement.target.id] = inspect.cleandoc(str(text.value))
    return found


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """How tensors become integers. Formulas: docs/numbers.md."""

    mode: str = "int8"
    """"int8" quantises every projection; "float" quantises nothing and equals fairseq's own layers."""
    bits: int = 8
    """Width of the integers, 2 to 8; of weights only under weight_format="int8". Narrower ones fill an int8 as well."""
    weight_init: str = "mse"
    """How a weight's first clip is measured: "fixed", "absmax", "percentile" or "mse" (OCTAV)."""
    activation_init: str = "mse"
    """How an activation's first clip is measured, on the first batch; "fixed" measures nothing."""
    weight_clip: float = 1.0
    """First clip of every weight under weight_init="fixed"."""
    activation_clip: float = 16.0
    """First clip of every activation under activation_init="fixed"."""
    calibration_passes: int = 4096
    """Clips are measured again at training passes 2, 4, 8, ... up to this one, while tensors still grow fast.

    Those of weights are measured eight times as often: each time the number of passes has grown by 9 %.
    """
    clip_step: float = 0.002
    """Largest relative change of a clip in one update. An optimizer such as Adam takes steps as long as its
    learning rate, which may be several percent of a small clip; see docs/numbers.md."""
    percentile: float = 99.99
    """Share of |x| in percent that lies inside the first clip under "percentile"."""
    weight_granularity: str = "channel"
    """One clip per output channel ("channel") or one per weight ("tensor"). Activations have one per tensor."""
    weight_format: str = "int8"
    """What weights are rounded to: "int8" (integers of `bits` bits) or "int4", which have fast products; any format of
    docs/formats.md, as "nvfp4" or "int6/row", through decoded values; or "float32": not at all. Patterns of names
    may follow, the last that fits counts: "int8,*fc2*=nvfp4,encoder.layers.0.*=float32"."""
    activation_format: str = "int8"
    """The same of activations: "int8" has fast products."""
    gradient_format: str = "int8"
    """The same of the gradients of products: "int8" rounds at random, all others to the nearest."""
    clip_gradient: str = "pact"
    """Gradient of clips: "pact" (out-of-range values only) or "lsq" (adds the rounding error in range)."""
    backward: str = "int8"
    """Products of the backward pass: "int8" (gradients rounded at random) or "float" (on the dequantised codes)."""
    backward_dtype: str = "float32"
    """dtype of the products under backward="float"; sums stay float32."""
    sparsity: str = ""
    """"2:4": of four neighbouring inputs of an output two weights count, in either mode; "": all do. More may follow:
    "2:4,every=16,decay=1,begin=0,end=500"; docs/sparsity.md."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits!r}; it must be a whole number from 2 to 8")
        require_choice("weight_init", self.weight_init, CALIBRATIONS)
        require_choice("activation_init", self.activation_init, CALIBRATIONS)
        require_positive("weight_clip", self.weight_clip)
        require_positive("activation_clip", self.activation_clip)
        if not isinstance(self.calibration_passes, int) or self.calibration_passes < 0:
            raise ValueError(f"calibration_passes is {self.calibration_passes!r}; it must be a whole number, 0 or more")
        if not 0 < self.clip_step < 1:
            raise ValueError(f"clip_step is {self.clip_step!r}; it must be above 0 and below 1")
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile is {self.percentile!r}; it must be above 0 and at most 100")
        require_choice("weight_granularity", self.weight_granularity, GRANULARITIES)
        for name, fast in FAST_FORMATS.items():
            check_choice(name, getattr(self, name), partial(check_format, fast))
        require_choice("clip_gradient", self.clip_gradient, CLIP_GRADIENTS)
        require_choice("backward", self.backward, BACKWARDS)
        require_choice("backward_dtype", self.backward_dtype, PRODUCT_DTYPES)
        Pruning.read(self.sparsity)
        self._check_decoded()

    def _check_decoded(self) -> None:
        """Refuse what does not go with formats that have no fast product."""
        if self.coded or not self.quantized:
            return
        if self.gradient_format != "int8" and self.backward == "float":
            raise ValueError(
                f'gradient_format is {self.gradient_format!r}, but backward="float" rounds no gradients: leave one out'
            )
        formats = ", ".join(f"{name} {getattr(self, name)!r}" for name in FAST_FORMATS)
        if self.clip_gradient == "lsq":
            raise ValueError(
                f'clip_gradient is "lsq", which knows integers with fast products alone, not {formats}: take "pact"'
            )
        if "int4" in format_choice(self.weight_format).formats:
            raise ValueError(f"{formats}: int4 weights go with int8 activations and gradients; take int4/group32/uint4")

    @property
    def quantized(self) -> bool:
        """Whether anything is quantised at all."""
        return self.mode == "int8"

    @property
    def pruning(self) -> Pruning | None:
        """Which weights count, and when that is decided; None: all do."""
        return Pruning.read(self.sparsity)

    @property
    def coded(self) -> bool:
        """Whether products read integers: all formats have fast ones. Else anything quantised is decoded first."""
        return self.quantized and all(
            form in fast for name, fast in FAST_FORMATS.items() for form in format_choice(getattr(self, name)).formats
        )

    @property
    def activations(self) -> Format | ScaledFormat | None:
        """What activations are rounded to that no pattern names; see activation_form."""
        return self.activation_form("")

    @property
    def weights(self) -> WeightFormat | ScaledFormat | None:
        """What weights are rounded to that no pattern names; see weight_form."""
        return self.weight_form("")

    @property
    def formats_differ(self) -> bool:
        """Whether patterns give some tensors other formats."""
        return any(format_choice(getattr(self, name)).exceptions for name in FAST_FORMATS)

    def activation_form(self, name: str) -> Format | ScaledFormat | None:
        """What an activation is rounded to, under one learned clip for a tensor; None: it is not."""
        if self.coded:
            return Format(name="activation", bits=self.bits, grain=Grain.TENSOR)
        return self._decoded(format_choice(self.activation_format).of(name), "tensor")

    def weight_form(self, name: str) -> WeightFormat | ScaledFormat | None:
        """What a weight is rounded to, with a learned clip for each output channel, or one for all; None: it is not."""
        form, per_row = format_choice(self.weight_format).of(name), self.weight_granularity == "channel"
        if self.coded:
            return WEIGHT_FORMATS[form](self.bits, Grain.ROW if per_row else Grain.TENSOR)
        return self._decoded(form, "row" if per_row else "tensor")

    def gradient_form(self, name: str) -> Format | ScaledFormat | None:
        """What the gradient of a product with a weight is rounded to: GRADIENT at random, others to the nearest; None:
        it is not."""
        if not self.quantized or self.backward == "float":
            return None
        form = format_choice(self.gradient_format).of(name)
        return GRADIENT if form == "int8" else self._decoded(form, "row")

    def weight_clips(self, name: str, rows: int) -> int:
        """How many clips a weight of so many output channels has.

        Formats with one scale for the tensor have one, with one for each row as many as rows.
        """
        form = self.weight_form(name)
        if isinstance(form, WeightFormat):
            return form.scales(rows)
        per_row = form.grain.rows == 1 if form.grain.columns is None else self.weight_granularity == "channel"
        return rows if per_row else 1

    def at(self, path: str, weights: Names, activations: Names, fitted: Fitted | None = None) -> "QuantConfig":
        """What concerns a part of a model: the same where patterns say nothing else.

        Args:
            path: of the part in the model.
            weights, activations: what the part calls its tensors -> their names in the state dict of the part.
            fitted: gets the patterns that fit something, by the names of fields.
        """
        if not self.formats_differ:
            return self
        fitted = defaultdict(set) if fitted is None else fitted
        named = {"weight_format": weights, "activation_format": activations, "gradient_format": weights}
        chosen = {one: format_choice(getattr(self, one)).at(path, names, fitted[one]) for one, names in named.items()}
        return replace(self, **chosen)

    def check_fitted(self, fitted: Fitted) -> None:
        """Refuse patterns that fit no tensor of a model.

        Raises:
            ValueError: names the first one.
        """
        for name in FAST_FORMATS:
            for pattern, form in format_choice(getattr(self, name)).exceptions:
                if pattern not in fitted.get(name, ()):
                    raise ValueError(
                        f"{name} gives {form} to {pattern!r}, but no tensor of this model is called so; names are "
                        "those of its state dict, of activations those of their clips without _clip"
                    )

    def _decoded(self, name: str, grain: str) -> ScaledFormat | None:
        """`grain`: of integers that are called by their width alone."""
        if not self.quantized or name == UNROUNDED:
            return None
        return scaled_format(f"int{self.bits}/{grain}" if name == "int8" else name)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How queries and keys turn by their places (RoFormer, Su et al. 2021), in halves as Llama's: lsq.ops.rotation."""

    places: int
    """Words of the longest sentence."""
    base: float = 10000.0
    """Column i of R / 2 turns by place * base ** (-2 i / R)."""
    width: int | None = None
    """R, columns of a head that turn, the first ones; None: all."""
    frequencies: tuple[float, ...] | None = None
    """In the place of base ** (-2 i / R), as models have them whose sentences were lengthened."""
    factor: float = 1.0
    """Of all cosines and sines (YaRN, Peng et al. 2023)."""

    def __post_init__(self) -> None:
        require_whole("places", self.places)
        require_positive("base", self.base)
        require_positive("factor", self.factor)
        if self.width is not None and (not isinstance(self.width, int) or self.width < 2 or self.width % 2):
            raise ValueError(f"width is {self.width!r}; it must be an even number above 0, or None")

    def columns(self, head: int) -> int:
        """R, for heads of so many columns.

        Raises:
            ValueError: they are too few, or an odd number, or there are not R / 2 frequencies.
        """
        found = head if self.width is None else self.width
        if found > head or found % 2:
            raise ValueError(f"{found} columns of a head cannot turn; give an even number up to its width, {head}")
        if self.frequencies is not None and 2 * len(self.frequencies) != found:
            raise ValueError(f"{len(self.frequencies)} frequencies are given; {found} columns need {found // 2}")
        return found


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """What scores get for how far a key stands from its query: a learned number for each head and bucket of distances
    (T5, Raffel et al. 2020). Half of the buckets are of one distance each, the others of ranges that grow."""

    buckets: int = 32
    """Rows of the table; in attention that is not causal, half of them for keys behind the query."""
    farthest: int = 128
    """Distance from which on all are in one bucket."""
    shared: bool = False
    """Whether the table is one for several layers: it comes along with each pass, and is no parameter of the layer."""

    def __post_init__(self) -> None:
        for name in ("buckets", "farthest"):
            require_whole(name, getattr(self, name))
        if self.buckets % 4 or self.farthest <= self.buckets // 2:
            raise ValueError(
                f"buckets is {self.buckets} and farthest {self.farthest}; buckets must be a multiple of 4, and "
                "farthest above half of them"
            )


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape and behaviour of one encoder or decoder layer; the names are fairseq's."""

    hidden: int
    """Width of the residual stream, H."""
    heads: int
    """Attention heads; must divide `hidden`."""
    key_heads: int | None = None
    """Heads of keys and of values; must divide `heads`, of which groups share one. None: as many as `heads`."""
    head_width: int | None = None
    """Columns of a head; None: hidden / heads."""
    score_factor: float | None = None
    """What a product of query and key counts in a score; None: head_width ** -0.5."""
    window: int | None = None
    """Of the words up to its own, how many a word sees in causal self-attention; None: all."""
    rotary: Rotary | None = None
    """How queries and keys of self-attention turn; None: they do not."""
    head_norm: float | None = None
    """Epsilon of an RMSNorm of each head of queries and keys before they turn, as Qwen3 has it; None: there is none."""
    relative_bias: RelativeBias | None = None
    """What scores of self-attention get for the distance of key and query; None: nothing."""
    feed_forward: int
    """Inner width of the feed-forward block, F."""
    dropout: float = 0.0
    """Dropout before every residual addition."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    activation_dropout: float = 0.0
    """Dropout after the feed-forward activation."""
    activation: str = "relu"
    """"relu", "gelu" (the exact form, with erf), "gelu_tanh" (its approximation), "silu" or "squared_relu"."""
    gated: bool = False
    """Whether the activation's result is multiplied by another projection of the same width (SwiGLU, GEGLU)."""
    bias: bool = True
    """Whether projections have a bias."""
    head_bias: bool | None = None
    """Whether those of queries, keys and values have one; None: as the others."""
    by_inputs: bool = False
    """Whether weights are [inputs, outputs], as GPT-2 has them, and not [outputs, inputs]."""
    pre_norm: bool = False
    """A norm before each block (True) or after its residual addition (False)."""
    norm: str = "layer"
    """"layer" (LayerNorm, as fairseq has it) or "rms" (RMSNorm, which has no bias)."""
    layer_norm_epsilon: float = 1e-5
    """Of either norm."""
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "feed_forward"):
            require_whole(name, getattr(self, name))
        for name in ("key_heads", "head_width", "window"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        if self.hidden % self.heads and self.head_width is None:
            raise ValueError(f"hidden size {self.hidden} is not divisible by {self.heads} heads")
        if self.heads % self.of_keys:
            raise ValueError(f"{self.heads} heads are not divisible by {self.of_keys} key_heads")
        if self.rotary is not None:
            self.rotary.columns(self.head_columns)
        if self.score_factor is not None:
            require_positive("score_factor", self.score_factor)
        if self.head_norm is not None:
            require_positive("head_norm", self.head_norm)
            if self.rotary is None:
                raise ValueError(f"head_norm is {self.head_norm!r}, but only heads that turn have norms: give `rotary`")
        if self.quant.coded:
            for name in ("hidden", "feed_forward"):
                check_dimension(name, getattr(self, name))
            check_dimension("the width of all heads of queries", self.query_columns)
            check_dimension("the width of all queries, keys and values", self.query_columns + 2 * self.key_columns)
        if self.quant.pruning is not None:
            for name in ("hidden", "feed_forward", "query_columns"):
                check_width(name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value!r}; it must be at least 0 and below 1")
        require_choice("activation", self.activation, ACTIVATIONS)
        require_choice("norm", self.norm, NORMS)
        require_positive("layer_norm_epsilon", self.layer_norm_epsilon)

    @property
    def biased_heads(self) -> bool:
        """Whether projections of queries, keys and values have a bias."""
        return self.bias if self.head_bias is None else self.head_bias

    @property
    def of_keys(self) -> int:
        """Heads of keys."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def head_columns(self) -> int:
        """Of a head."""
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def query_columns(self) -> int:
        """Of all heads of queries."""
        return self.heads * self.head_columns

    @property
    def key_columns(self) -> int:
        """Of all heads of keys, and of all heads of values."""
        return self.of_keys * self.head_columns


def check_dimension(name: str, value: int) -> None:
    """Refuse a width that int8 products cannot take, naming the next one that they can.

    Raises:
        ValueError: `value` is not a multiple of DIMENSION_MULTIPLE.
    """
    if value % DIMENSION_MULTIPLE:
        larger = -(-value // DIMENSION_MULTIPLE) * DIMENSION_MULTIPLE
        raise ValueError(
            f"{name} is {value}, but int8 products need a multiple of {DIMENSION_MULTIPLE}; use {larger}"
        )
