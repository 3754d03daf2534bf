"""How tensors are rounded: QuantConfig, and fields of version 0.1."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
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
from lsq.quant.formats import NARROW, check_choice, format_choice, weight_format
from lsq.quant.numbers import ScaledFormat, scaled_format

MODES = ("float", "int8")
BACKWARDS = ("float", "int8")
GRANULARITIES = ("tensor", "channel")
CLIPS = ("auto", "absmax", "learned")
ONLY_LEARNED = {"clip_init": "mse", "weight_granularity": "channel", "clip_gradient": "pact"}
"""Fields that only learned clips read -> their defaults."""
Names = Mapping[str, Sequence[str]]
"""Name of a tensor in a module's program -> its names in the module's state dict."""
Fitted = dict[str, dict[str, set[str]]]
"""Field of QuantConfig -> pattern that fits a tensor -> formats of all tensors that it fits."""
FAST_FORMATS = {
    "weight_format": WEIGHT_FORMATS,
    "activation_format": ("int8",),
    "gradient_format": ("int8",),
}
"""Field of QuantConfig -> formats whose codes products read without decoding."""
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
"""Fields of version 0.1 that cannot be chosen any more -> their values."""
RENAMED = {"weight_init": "clip_init", "activation_init": "clip_init"}
"""Fields of version 0.1 -> their new names."""


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


def _measures(field: str, name: str) -> bool:
    """Whether the clips of a format may be measured in every pass."""
    form = weight_format(name, 8, Grain.ROW) if field == "weight_format" else None
    return name == "int8" or (form is not None and form.ternary)


FROM_FILE = "@"
"""Begins a format that stands in a file: "@mix/weight_format.txt"."""


def read_format(field: str, given: Any) -> Any:
    """Return a field's value, or the text of the file that it names."""
    if field not in FAST_FORMATS or not isinstance(given, str) or not given.startswith(FROM_FILE):
        return given
    try:
        return Path(given.removeprefix(FROM_FILE)).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{field} is {given!r}, a file of formats such as `lsq allocate` writes, but it cannot"
            f" be read: {error}"
        ) from None


def of_this_version(given: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields of version 0.1, and read formats in files; raises ValueError for values that
    would be lost."""
    given = {name: read_format(name, value) for name, value in given.items()}
    fields = without_constants(given, CONSTANT)
    for name in RENAMED.keys() & given.keys():
        value, now = fields.pop(name), RENAMED[name]
        if fields.setdefault(now, value) != value:
            names = sorted(RENAMED.keys() & given.keys())
            raise ValueError(
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {now} now, which is"
                f" one for weights and activations: give {now} alone"
            )
        warn(f"{name} is {now} now, for weights and activations")
    return fields


def of_trained(given: Mapping[str, Any], *, goes_on: bool = True) -> dict[str, Any]:
    """Return fields of QuantConfig for a training by version 0.1.

    Fields that are constant now are left out; if the training `goes_on`, those with another value
    give a warning. Clips that learned go on learning.
    """
    before = {name: given[name] for name in {*CONSTANT, *RENAMED} & given.keys()}
    fields = {name: value for name, value in given.items() if name not in before}
    inits = {before[name] for name in RENAMED if name in before}
    if inits and "clip_init" not in fields:
        fields["clip_init"] = inits.pop() if len(inits) == 1 else "mse"
    defaults = {**CONSTANT, **dict.fromkeys(RENAMED, "mse")}
    changed = {name for name, value in before.items() if value != defaults[name]}
    # before the field `clips`, all clips learned
    earliest, other = "clips" not in given and before, changed - {"backward_dtype"}
    if earliest or (fields.get("clips") == "auto" and other):
        fields["clips"] = "learned"
    for name in CONSTANT.keys() & changed if goes_on else ():
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
    """Bits of integer codes, 2 to 8; for weights only if weight_format is "int8". An int8 stores
    every code."""
    clips: str = "auto"
    """Where clips come from. "absmax": a weight's clips are the largest magnitudes of its rows at
    every update, or mean magnitudes if it is ternary or has 2 bits (BitNet b1.58); an activation's
    clip follows the largest magnitude of earlier passes. "learned": clips are measured, then
    trained as parameters (PACT). "auto": "absmax" if all formats are int8 of 8 bits or ternary
    weights, and no option for learned clips is given, else "learned".
    """
    clip_init: str = "mse"
    """How learned clips are first measured, for activations on the first batch: "absmax",
    "percentile" (99.99 % of the values lie inside) or "mse" (OCTAV). "fixed" measures none: clips
    begin with 1 for weights and 16 for activations.
    """
    weight_granularity: str = "channel"
    """One clip per output channel ("channel") or per weight ("tensor"). An activation has one clip;
    the gated product of a feed-forward block has a scale per row instead, unless clips learn."""
    weight_format: str = "int8"
    """Format of weights. "int8" (integers of `bits` bits), "int4", and integers with a scale for
    each row or for the tensor, as "int2/row" or "ternary/tensor", have fast products. Other formats
    of docs/numbers.md, such as "nvfp4", are multiplied as groups of codes or as decoded values.
    "float32" rounds nothing. Patterns of names may follow; the last that fits a name counts:
    "int8,*fc2*=nvfp4,encoder.layers.0.*=float32". "@FILE" stands for the text of a file, as `lsq
    allocate` writes it.
    """
    activation_format: str = "int8"
    """Format of activations, written as for weights; only "int8" has fast products. A pattern may
    also fit the name of a weight that reads the activation."""
    gradient_format: str = "int8"
    """Format of the gradients of products: "int8" rounds at random, others to the nearest."""
    clip_gradient: str = "pact"
    """Gradient of clips: "pact" (from values out of range) or "lsq" (also from rounding errors of
    values in range)."""
    backward: str = "int8"
    """Products of the backward pass: "int8" (gradients rounded at random) or "float" (on the
    dequantised codes)."""
    sparsity: str = ""
    """"2:4": of four neighbouring inputs of an output, two weights count, in either mode. "": all
    count. Options may follow, "2:4,every=16,decay=1,begin=0,end=500": see docs/numbers.md.
    """

    calibration_passes: ClassVar[int] = CONSTANT["calibration_passes"]
    """The last training pass that measures learned clips again, while tensors still grow fast.
    Clips of activations are measured at passes 2, 4, 8, ... and the seven or more after each; the
    largest counts, so that every kind of batch has a say. Clips of weights are measured eight times
    as often, each time the number of passes has grown by 9 %."""
    clip_step: ClassVar[float] = CONSTANT["clip_step"]
    """Largest relative change of a clip in one update. A step of Adam is about as long as its
    learning rate, which may be several percent of a small clip."""
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
        """Raise a ValueError for options that do not go with decoded formats."""
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
        """Raise a ValueError for options that need learned clips under clips="absmax"."""
        others = self._only_learned if self.clips == "absmax" and self.quantized else ()
        for name in others:
            raise ValueError(
                f'{name} is {getattr(self, name)!r}, but clips is "absmax", which is for int8 and'
                " ternary weights, and measures every clip "
                f'in every pass: leave {name} out, or take clips="learned"'
            )

    @property
    def _only_learned(self) -> list[str]:
        """Names of the fields whose values need learned clips."""
        formats = [
            name
            for name in FAST_FORMATS
            if not all(_measures(name, form) for form in format_choice(getattr(self, name)).formats)
        ]
        return formats + [
            name for name, default in ONLY_LEARNED.items() if getattr(self, name) != default
        ]

    @cached_property
    def quantized(self) -> bool:
        """Whether anything is rounded."""
        return self.mode == "int8"

    @cached_property
    def learned(self) -> bool:
        """Whether clips are parameters that train."""
        if self.clips == "auto":
            return self.quantized and (self.bits < 8 or bool(self._only_learned))
        return self.quantized and self.clips == "learned"

    @property
    def pruning(self) -> Pruning | None:
        """Which weights count, and when they are chosen; None: all count."""
        return Pruning.read(self.sparsity)

    @cached_property
    def coded(self) -> bool:
        """Whether products read codes: all formats are fast. Else they read decoded values."""
        return self.quantized and all(
            form in fast or (name == "weight_format" and NARROW.fullmatch(form))
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
        """Return the format of an activation, which has one clip; None: it is not rounded."""
        if self.coded:
            return Format(name="activation", bits=self.bits, grain=Grain.TENSOR)
        return self._decoded(format_choice(self.activation_format).of(name), "tensor")

    def weight_form(self, name: str) -> WeightFormat | ScaledFormat | None:
        """Return the format of a weight, with clips by `weight_granularity`; None: not rounded."""
        form = format_choice(self.weight_format).of(name)
        per_row = self.weight_granularity == "channel"
        if self.coded:
            return weight_format(form, self.bits, Grain.ROW if per_row else Grain.TENSOR)
        return self._decoded(form, "row" if per_row else "tensor")

    def gradient_form(self, name: str) -> Format | ScaledFormat | None:
        """Return the format of the gradient of a weight's product (GRADIENT rounds at random)."""
        if not self.quantized or self.backward == "float":
            return None
        form = format_choice(self.gradient_format).of(name)
        return GRADIENT if form == "int8" else self._decoded(form, "row")

    def weight_clips(self, name: str, rows: int) -> int:
        """Return the number of clips of a weight with `rows` output channels: `rows` or 1."""
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
        """Return the configuration of the module at `path`, with the formats that patterns choose.

        `weights`, `activations`: its tensors -> their names in its state dict. The patterns that
        fit are added to `fitted`, by field. Raises ValueError if patterns give different formats
        to weights that are one tensor here, or to their inputs.
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
        """Raise a ValueError that names the first pattern without effect in a model.

        `fitted`: patterns that fit a tensor. `names`: the model's tensors, by field. `floats`:
        parameters that may stay floats.
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
        """Return the format `name`, or None; "int8" gets this `grain`, as its name has none."""
        if not self.quantized or name == UNROUNDED:
            return None
        return scaled_format(f"int{self.bits}/{grain}" if name == "int8" else name)
