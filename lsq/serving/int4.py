"""Rounding of a trained model's wider weights to 4 bits, by least squared error.

The trained values, codes times scales, are rounded. Activations keep their clips, and nothing is
trained again. The clip of each row is searched; groups of 32 inputs have multipliers under it (Int4
of lsq/quant/formats.py). P outputs, K inputs.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from lsq.quant.formats import Int4, WeightFormat, format_choice, weight_format
from lsq.run.backends import backend
from lsq.serving.decoding_model import DecodingModel, round_weight
from lsq.serving.stored_codes import mix_of

INT4 = {"weight_granularity": "channel", "clips": "auto", "gradient_format": "int8"}
"""Fields of QuantConfig that go with weights in int4."""
CODES, SCALE = ".codes", ".scale"
TRIED = tuple(1 - 0.04 * step for step in range(10))
"""Clips that are tried for a row, as parts of its largest magnitude."""


@torch.no_grad()
def with_int4(model: DecodingModel) -> DecodingModel:
    """Return the model with its weights rounded to int4. Weights in int4, and integers of up to 4
    bits, stay; a model of such weights is returned as it is."""
    architecture, tensors = model.architecture, dict(model.tensors)
    weights = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
    wide = {name for name in weights if not _is_narrow(architecture.format_of(name))}
    if not wide:
        return model
    stacks = {}
    for side, stack in architecture.stacks.items():
        quant, own = stack.config.quant, [name for name in weights if name.startswith(side)]
        before = format_choice(quant.weight_format)
        mix = mix_of({name: "int4" if name in wide else before.of(name) for name in own})
        quant = replace(quant, **INT4, weight_format=mix)
        stacks[side] = replace(stack, config=replace(stack.config, quant=quant))
    architecture = replace(architecture, **stacks)
    every = tqdm(sorted(wide), desc="rounding to 4 bits", unit="weight", leave=False, disable=None)
    for name in every:
        values = tensors[name + CODES].float() * tensors[name + SCALE][:, None]
        form = architecture.format_of(name)
        tensors[name + CODES], tensors[name + SCALE] = least_squares(values, form)
    return DecodingModel(architecture=architecture, tensors=tensors)


def _is_narrow(form: WeightFormat) -> bool:
    """Whether codes have up to 4 bits, and may stand beside int4."""
    if isinstance(form, Int4):
        return True
    return form.bits <= 4 and weight_format(form.name, form.bits, form.grain) is not None


def least_squares(values: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round floats [P, K], each row under the clip among TRIED with the least squared error.

    Returns:
        (stored codes int8 [P, stored columns], scale float32 [P], NaN for a row with a NaN or an
            infinity)
    """
    largest = values.abs().amax(dim=1)
    usable = largest.isfinite()
    # rows of zeros are exact under any clip
    largest = torch.where(usable & (largest > 0), largest, 1.0)
    stored = torch.zeros(len(values), form.stored_columns(values.shape[1]), dtype=form.storage)
    scale = torch.ones(len(values), dtype=torch.float32)
    least = torch.full_like(scale, math.inf)
    for part in TRIED:
        weight = round_weight(values, part * largest, form, backend("cpu"))
        error = form.unpack(weight.codes, values.shape[1]) * weight.scale[:, None] - values
        error = (error / largest[:, None]).square().sum(dim=1)  # large squares overflow
        better = error < least
        stored = torch.where(better[:, None], weight.codes, stored)
        scale, least = torch.where(better, weight.scale, scale), torch.minimum(error, least)
    return stored, scale.masked_fill(~usable, math.nan)
