"""Weights of decoding models whose codes are the whole numbers of a number format.

The layers of such a model decode their weights and sum whole products; an engine multiplies the
same whole numbers as codes. N rows, K columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lsq.config import QuantConfig
from lsq.config.quantization import FAST_FORMATS
from lsq.quant.formats import Grain, WeightFormat, format_choice
from lsq.quant.numbers import FLOAT32, ScaledFormat
from lsq.quant.stored import StoredType, stored_type
from lsq.quant.tables import NumberFormat, integer

LARGEST = 127
"""Largest whole number that is a code."""


@dataclass(frozen=True, kw_only=True)
class WholeCodes(WeightFormat):
    """The whole numbers of a number format as int8, with one scale for each row, or for all."""

    number: NumberFormat

    @property
    def largest(self) -> int:
        return round(self.number.largest / stored_type(self.number).unit)

    def encode(self, values: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
        """Round floats [N, K] as FakeQuantize does under given clips; see WeightFormat.encode."""
        limit, unit = clip.view(-1, 1), stored_type(self.number).unit
        scale = limit / self.number.largest
        missing = values.isnan()
        steps = torch.where((scale == 0) | missing, 0.0, torch.clamp(values, -limit, limit) / scale)
        levels = self.number.decode(self.number.encode(steps))
        scale = (scale * unit).flatten().expand(len(values))
        poisoned = missing.any(1) if len(clip) > 1 else missing.any()
        codes = (levels / unit).round().to(torch.int8)
        return codes, scale.masked_fill(poisoned, math.nan)


def mix_of(formats: Mapping[str, str]) -> str:
    """Return the weight_format that gives each weight, by name, its format."""
    ((others, _),) = Counter(formats.values()).most_common(1)
    return ",".join(
        [others, *(f"{name}={form}" for name, form in formats.items() if form != others)]
    )


def format_of(quant: QuantConfig, name: str = "") -> WeightFormat | None:
    """Return the format of a weight's codes; None: the weight cannot be kept as codes."""
    if not quant.quantized or {*format_choice(quant.activation_format).formats} != {"int8"}:
        return None
    form = quant.weight_form(name)
    if isinstance(form, WeightFormat):
        return form
    if not isinstance(form, ScaledFormat):
        return None
    stored = stored_type(form.number)
    whole = stored.whole and form.number.largest / stored.unit <= LARGEST
    if not whole or form.scales != FLOAT32 or form.grain not in (Grain.ROW, Grain.TENSOR):
        return None
    chosen = format_choice(quant.weight_format).of(name)
    return WholeCodes(name=chosen, bits=stored.bits, grain=form.grain, number=form.number)


def as_int8(quant: QuantConfig) -> QuantConfig:
    """Return the configuration of programs that read such weights as int8 codes."""
    formats = dict.fromkeys(FAST_FORMATS, "int8")
    return replace(quant, **formats, clips="learned" if quant.learned else "absmax")


def number_of(form: WeightFormat) -> NumberFormat:
    """Return the number format whose whole numbers are the codes of a weight."""
    return form.number if isinstance(form, WholeCodes) else integer(form.bits)


def stored_of(form: WeightFormat) -> tuple[StoredType, Tensor]:
    """Return how codes are stored, in whole steps, and int32 [V]: the codes in their order."""
    number = number_of(form)
    count = len({value for value in number.values if math.isfinite(value)})
    stored = stored_type(number)
    ranks = torch.arange(count, dtype=torch.uint8, device="cpu")
    return replace(stored, unit=1.0), stored.whole_values(stored.stored(ranks))


def ranks_of(codes: Tensor, form: WeightFormat) -> Tensor:
    """Return the ranks uint8 of codes int8, any shape. Raises ValueError: a code is no value."""
    _, wholes = stored_of(form)
    ranks = torch.searchsorted(wholes, codes.int()).clamp(max=len(wholes) - 1)
    if not torch.equal(wholes[ranks], codes.int()):
        raise ValueError(
            f"codes of a weight in {form.name} are no values of {number_of(form).name}"
        )
    return ranks.to(torch.uint8)
