"""Models whose weights are stored in 4 bits: those that were trained with 8, rounded again, by
least squared error.

What is rounded is what the model was trained with, its codes times their scales; activations keep
their clips. So nothing is trained again. A row's clip is searched, groups of 32 inputs find their
multipliers under it (Int4 of lsq/quant/formats.py). P outputs, K inputs.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from lsq.ops.rounding import RoundWeight
from lsq.program.values import Weight
from lsq.quant.formats import Int4, WeightFormat
from lsq.run.backends import backend
from lsq.serving.decode.model import DecodingModel

INT4 = {"weight_format": "int4", "weight_granularity": "channel", "clips": "auto"}
"""What a QuantConfig says of such weights."""
CODES, SCALE = ".codes", ".scale"
TRIED = tuple(1 - 0.04 * step for step in range(10))
"""Clips that are tried for a row, as parts of its largest value."""


@torch.no_grad()
def with_int4(model: DecodingModel) -> DecodingModel:
    """The same model with weights in int4; one that was trained with them comes back as it is."""
    if isinstance(model.architecture.decoder.config.quant.weights, Int4):
        return model
    stacks = {
        side: replace(
            stack, config=replace(stack.config, quant=replace(stack.config.quant, **INT4))
        )
        for side, stack in model.architecture.stacks.items()
    }
    architecture = replace(model.architecture, **stacks)
    tensors, form = dict(model.tensors), architecture.decoder.config.quant.weights
    weights = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
    for name in tqdm(weights, desc="rounding to 4 bits", unit="weight", leave=False, disable=None):
        values = tensors[name + CODES].float() * tensors[name + SCALE][:, None]
        tensors[name + CODES], tensors[name + SCALE] = least_squares(values, form)
    return DecodingModel(architecture=architecture, tensors=tensors)


def least_squares(values: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """(what the format stores, int8 [P, stored columns], scale float32 [P]) of floats [P, K], by
    the clip of each row, of those that are TRIED, under which the sum of squared errors is least.
    The scale of a row with a NaN or an infinity is NaN.
    """
    largest = values.abs().amax(dim=1)
    usable = largest.isfinite()
    # rows of zeros are exact under any clip
    largest = torch.where(usable & (largest > 0), largest, 1.0)
    stored = torch.zeros(len(values), form.stored_columns(values.shape[1]), dtype=form.storage)
    scale = torch.ones(len(values), dtype=torch.float32)
    least = torch.full_like(scale, math.inf)
    for part in TRIED:
        found = _rounded(values, part * largest, form)
        error = form.unpack(found.codes, values.shape[1]) * found.scale[:, None] - values
        error = (error / largest[:, None]).square().sum(dim=1)  # squares alone may be infinite
        better = error < least
        stored = torch.where(better[:, None], found.codes, stored)
        scale, least = torch.where(better, found.scale, scale), torch.minimum(error, least)
    return stored, scale.masked_fill(~usable, math.nan)


def _rounded(values: Tensor, clip: Tensor, form: WeightFormat) -> Weight:
    """What the format stores under clips [P]."""
    place = backend("cpu")
    weight = Weight(
        format=form,
        values=values,
        clip=clip,
        codes=place.allocate((len(values), form.stored_columns(values.shape[1])), form.storage),
        scale=place.allocate((len(values),), torch.float32),
    )
    place.run(RoundWeight(weight=weight))
    return weight
