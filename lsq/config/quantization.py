"""How tensors become integers, or values of other formats."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, ClassVar

from lsq.config.checks import accept, require_choice, warn, without_constants
from lsq.quant import (
    CALIBRATIONS,
    CLIP_GRADIENTS,
    GRADIENT,
    WEIGHT_FORMATS,
    Format,
    Grain,
    Pruning,
    WeightFormat,
)
from lsq.quant.formats import check_choice, format_choice
from lsq.quant.numbers import ScaledFormat, scaled_format

MODES = ("float", "int8")
BACKWARDS = ("float", "int8")
GRANULARITIES = ("tensor", "channel")
CLIPS = ("auto", "absmax", "learned")
ONLY_LEARNED = {"clip_init": "mse", "weight_granularity": "channel", "clip_gradient": "pact"}
"""Fields that say how clips are measured and learn, and their defaults."""
Names = Mapping[str, Sequence[str]]
"""Name of a tensor within a part of a model -> its names in the state dict of the part."""
Fitted = dict[str, dict[str, set[str]]]
"""Names of fields of QuantConfig -> patterns that fit a tensor -> formats of all that they fit."""
FAST_FORMATS = {
    "weight_format": WEIGHT_FORMATS,
    "activation_format": ("int8",),
    "gradient_format": ("int8",),
}
"""Field of QuantConfig -> formats that products read as they are."""
UNROUNDED = "float32"
"""Name of the format of tensors that are not rounded."""


CONSTANT = {
    "calibration_passes": 4096,
    "clip_step": 0.002,
    "percentile": 99.99,
    "weight_clip": 1.0,
    "activation_clip": 16.0,
    "backward_dtype": "float32",
}
"""Fields of QuantConfig that cannot be chosen any more, and their values."""
RENAMED = {"weight_init": "clip_init", "activation_init": "clip_init"}
"""Fields of QuantConfig -> what they are now."""


def check_format(fast: Collection[str], name: str) -> None:
    """Raise a ValueError, which offers the nearest name, for a format that does not exist."""
    if name in (*fast, UNROUNDED):
        return
    try:
        scaled_format(name)
    except ValueError as error:
        allowed = ", ".join(map(repr, (*fast, UNROUNDED)))
        raise ValueError(
            f"allowed are {allowed}, and formats of docs/numbers.md, but {error}"
        ) from None


def of_this_version(given: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields of version 0.1; raises ValueError for values that would be lost."""
    fields = without_constants(given, CONSTANT)
    for name in RENAMED.keys() & given.keys():
        value, now = fields.pop(name), RENAMED[name]
        if fields.setdefault(now, value) != value:
            raise ValueError(
                f"{' and '.join(sorted(RENAMED.keys() & given.keys()))} are {now} now, which is"
                f" one for weights and activations: give {now} alone"
            )
        warn(f"{name} is {now} now, for weights and activations")
    return fields


def of_trained(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields of a training by version 0.1: constants go, and clips that learned go on."""
    before = {name: given[name] for name in {*CONSTANT, *RENAMED} & given.keys()}
    fields = {name: value for name, value in given.items() if name not in before}
    inits = {before[name] for name in RENAMED if name in before}
    if inits and "clip_init" not in fields:
        fields["clip_init"] = inits.pop() if len(inits) == 1 else "mse"
    defaults = {**CONSTANT, **dict.fromkeys(RENAMED, "mse")}
    changed = {name for name, value in before.items() if value != defaults[name]}
    # before there was a choice, all clips learned
    earliest, other = "clips" not in given and before, changed - {"backward_dtype"}
    if earliest or (fields.get("clips") == "auto" and other):
        fields["clips"] = "learned"
    for name in CONSTANT.keys() & changed:
        warn(f"{name} was {before[name]!r} in this training; it is always {CONSTANT[name]!r} now")
    return fields


@accept(of_this_version)
@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """How tensors become integers. Formulas: docs/numbers.md."""

    mode: str = "int8"
    """"int8" quantises every projection; "float" quantises nothing and equals fairseq's own layers.
    """
    bits: int = 8
    """Width of the integers, 2 to 8; of weights only under weight_format="int8".

    Narrower ones fill an int8 as well.
    """
    clips: str = "auto"
    """Where clips come from. "absmax": a weight's is the largest magnitude of each row at every
    update, an activation's follows that of the passes before. "learned": PACT, they are measured,
    then trained as parameters. "auto": "absmax" where all formats are int8 of 8 bits and no option
    below that is of learned clips is given.
    """
    clip_init: str = "mse"
    """How clips that learn are first measured, those of activations on the first batch: "absmax",
    "percentile" (99.99 % of the values lie inside), "mse" (OCTAV), or "fixed": not at all, they
    begin with 1 for weights and 16 for activations.
    """
    weight_granularity: str = "channel"
    """One clip per output channel ("channel") or one per weight ("tensor").

    Activations have one per tensor. The middle of a gated block has a scale for each row, unless
    clips learn.
    """
    weight_format: str = "int8"
    """What weights are rounded to: "int8" (integers of `bits` bits) or "int4", which have fast
    products; any format of docs/numbers.md, as "nvfp4" or "int6/row", through decoded values; or
    "float32": not at all. Patterns of names
    may follow, the last that fits counts: "int8,*fc2*=nvfp4,encoder.layers.0.*=float32".
    """
    activation_format: str = "int8"
    """Formats of activations, as of weights: "int8" has fast products.

    Patterns fit names of the weights that read them, too.
    """
    gradient_format: str = "int8"
    """Formats of the gradients of products: "int8" rounds at random, all others to the nearest."""
    clip_gradient: str = "pact"
    """Gradient of clips: "pact" (out-of-range values only) or "lsq" (adds the rounding error in
    range)."""
    backward: str = "int8"
    """Products of the backward pass: "int8" (gradients rounded at random) or "float" (on the
    dequantised codes)."""
    sparsity: str = ""
    """"2:4": of four neighbouring inputs of an output two weights count, in either mode; "": all
    do. More may follow: "2:4,every=16,decay=1,begin=0,end=500"; docs/numbers.md.
    """

    calibration_passes: ClassVar[int] = CONSTANT["calibration_passes"]
    """Clips that learn are measured again at training passes 2, 4, 8, ... up to this one, while
    tensors still grow fast; those of weights eight times as often, each time the number of passes
    has grown by 9 %. Clips of activations are the largest that one of these passes, or of the seven
    after it, gives, so that every kind of batch counts.
    """
    clip_step: ClassVar[float] = CONSTANT["clip_step"]
    """Largest relative change of a clip in one update: an optimizer such as Adam takes steps as
    long as its learning rate, which may be several percent of a small clip."""
    percentile: ClassVar[float] = CONSTANT["percentile"]
    """Percent of |x| inside the first clip under clip_init="percentile"."""
    weight_clip: ClassVar[float] = CONSTANT["weight_clip"]
    activation_clip: ClassVar[float] = CONSTANT["activation_clip"]
    """First clips under clip_init="fixed"."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits!r}; it must be a whole number from 2 to 8")
        require_choice("clips", self.clips, CLIPS)
        require_choice("clip_init", self.clip_init, CALIBRATIONS)
        require_choice("weight_granularity", self.weight_granularity, GRANULARITIES)
        for name, fast in FAST_FORMATS.items():
            check_choice(name, getattr(self, name), partial(check_format, fast))
        require_choice("clip_gradient", self.clip_gradient, CLIP_GRADIENTS)
        require_choice("backward", self.backward, BACKWARDS)
        Pruning.read(self.sparsity)
        self._check_decoded()
        self._check_clips()

    def _check_decoded(self) -> None:
        """Refuse what does not go with formats that have no fast product."""
        if self.coded or not self.quantized:
            return
        if self.gradient_format != "int8" and self.backward == "float":
            raise ValueError(
                f'gradient_format is {self.gradient_format!r}, but backward="float" rounds no'
                " gradients: leave one out"
            )
        formats = ", ".join(f"{name} {getattr(self, name)!r}" for name in FAST_FORMATS)
        if self.clip_gradient == "lsq":
            raise ValueError(
                'clip_gradient is "lsq", which knows integers with fast products alone, not'
                f' {formats}: take "pact"'
            )
        if "int4" in format_choice(self.weight_format).formats:
            raise ValueError(
                f"{formats}: int4 weights go with int8 activations and gradients; take"
                " int4/group32/uint4"
            )

    def _check_clips(self) -> None:
        """Refuse what only clips that learn can do."""
        others = self._only_learned if self.clips == "absmax" and self.quantized else ()
        for name in others:
            raise ValueError(
                f'{name} is {getattr(self, name)!r}, but clips is "absmax", which is for int8 and'
                " measures every clip "
                f'in every pass: leave {name} out, or take clips="learned"'
            )

    @property
    def _only_learned(self) -> list[str]:
        """The names of fields whose values only clips that learn can have."""
        formats = [
            name
            for name in FAST_FORMATS
            if set(format_choice(getattr(self, name)).formats) != {"int8"}
        ]
        return formats + [
            name for name, default in ONLY_LEARNED.items() if getattr(self, name) != default
        ]

    @cached_property
    def quantized(self) -> bool:
        """Whether anything is quantised at all."""
        return self.mode == "int8"

    @cached_property
    def learned(self) -> bool:
        """Whether clips are parameters that train."""
        if self.clips == "auto":
            return self.quantized and (self.bits < 8 or bool(self._only_learned))
        return self.quantized and self.clips == "learned"

    @property
    def pruning(self) -> Pruning | None:
        """Which weights count, and when that is decided; None: all do."""
        return Pruning.read(self.sparsity)

    @cached_property
    def coded(self) -> bool:
        """Whether products read integers, as all formats have fast ones; else decoded values."""
        return self.quantized and all(
            form in fast
            for name, fast in FAST_FORMATS.items()
            for form in format_choice(getattr(self, name)).formats
        )

    @property
    def activations(self) -> Format | ScaledFormat | None:
        """Format of activations that no pattern names; see activation_form."""
        return self.activation_form("")

    @property
    def weights(self) -> WeightFormat | ScaledFormat | None:
        """Format of weights that no pattern names; see weight_form."""
        return self.weight_form("")

    @property
    def formats_differ(self) -> bool:
        """Whether patterns give some tensors other formats."""
        return any(format_choice(getattr(self, name)).exceptions for name in FAST_FORMATS)

    def activation_form(self, name: str) -> Format | ScaledFormat | None:
        """Return what an activation is rounded to, under one clip for a tensor, or None."""
        if self.coded:
            return Format(name="activation", bits=self.bits, grain=Grain.TENSOR)
        return self._decoded(format_choice(self.activation_format).of(name), "tensor")

    def weight_form(self, name: str) -> WeightFormat | ScaledFormat | None:
        """Return what a weight is rounded to, by clips of output channels or one for all, or
        None."""
        form = format_choice(self.weight_format).of(name)
        per_row = self.weight_granularity == "channel"
        if self.coded:
            return WEIGHT_FORMATS[form](self.bits, Grain.ROW if per_row else Grain.TENSOR)
        return self._decoded(form, "row" if per_row else "tensor")

    def gradient_form(self, name: str) -> Format | ScaledFormat | None:
        """Return what the gradient of a weight's product is rounded to (GRADIENT: at random)."""
        if not self.quantized or self.backward == "float":
            return None
        form = format_choice(self.gradient_format).of(name)
        return GRADIENT if form == "int8" else self._decoded(form, "row")

    def weight_clips(self, name: str, rows: int) -> int:
        """Return the number of clips of a weight of so many output channels: `rows` or 1."""
        form = self.weight_form(name)
        if isinstance(form, WeightFormat):
            return form.scales(rows)
        per_row = (
            form.grain.rows == 1
            if form.grain.columns is None
            else self.weight_granularity == "channel"
        )
        return rows if per_row else 1

    @property
    def summary(self) -> str:
        """Number formats of layers, in words."""
        formats = {name.removesuffix("_format"): getattr(self, name) for name in FAST_FORMATS}
        if self.bits < 8:  # gradients have 8
            narrow = partial(re.sub, r"(^|=)int8(?=,|$)", rf"\1int8 of {self.bits} bits")
            formats |= {name: narrow(formats[name]) for name in ("weight", "activation")}
        if not self.quantized:
            return "in floats"
        if self.backward == "float":
            formats["gradient"] = "floats"
        if set(formats.values()) == {"int8"}:
            return "in int8"
        return "with " + ", ".join(f"{what}s in {form}" for what, form in formats.items())

    def at(
        self, path: str, weights: Names, activations: Names, fitted: Fitted | None = None
    ) -> "QuantConfig":
        """Return the configuration of a part of a model, where patterns may choose other formats.

        `path`: of the part. `weights`, `activations`: its tensors -> their names in its state dict.
        `fitted` gets the patterns that fit, by field. Raises ValueError if patterns give weights
        that are one tensor here, or their inputs, different formats.
        """
        if not self.formats_differ:
            return self
        fitted, chosen = {} if fitted is None else fitted, {}
        named = zip(FAST_FORMATS, (weights, activations, weights), strict=True)
        for field, names in named:
            choice, found = format_choice(getattr(self, field)), fitted.setdefault(field, {})
            try:
                chosen[field] = choice.at(path, names, found, read=names is activations)
            except ValueError as error:
                raise ValueError(f"{field} {error}") from None
        return replace(self, **chosen)

    def check_fitted(
        self, fitted: Fitted, names: Mapping[str, Sequence[str]], floats: Sequence[str] = ()
    ) -> None:
        """Raise a ValueError that names the first pattern which decides nothing in a model.

        `fitted`: patterns that fit a tensor. `names`: of the model's tensors, by field. `floats`:
        names of parameters that may stay floats.
        """
        for name in FAST_FORMATS:
            for pattern, form in format_choice(getattr(self, name)).exceptions:
                given = f"{name} gives {form} to {pattern!r}, but"
                formats = fitted.get(name, {}).get(pattern)
                if formats is None:
                    stays = next((one for one in floats if fnmatchcase(one, pattern)), None)
                    lacks = "no tensor of this model is called so"
                    lacks = lacks if stays is None else f"{stays} stays a float here"
                    nearest = ", ".join(get_close_matches(pattern, names[name], cutoff=0)) or "none"
                    raise ValueError(f"{given} {lacks}; nearest are {nearest}")
                if form not in formats:
                    raise ValueError(
                        f"{given} later patterns give all that it fits"
                        f" {' or '.join(sorted(formats))}, since the last one that fits counts:"
                        " write it behind them, or leave it out"
                    )

    def _decoded(self, name: str, grain: str) -> ScaledFormat | None:
        """`grain`: of integers that are called by their width alone."""
        if not self.quantized or name == UNROUNDED:
            return None
        return scaled_format(f"int{self.bits}/{grain}" if name == "int8" else name)
