"""Activations in formats without a fast product: as decoded values, and as codes where products of
weights that stay as they are multiply those. M rows, K columns.
"""

import math

import torch

from lsq.ops.fake_quantize import FakeQuantize
from lsq.ops.grouped_product import STEP, GroupedCodes, common_group
from lsq.program.builder import Builder
from lsq.program.parameters import Kind
from lsq.program.values import Rows
from lsq.quant.numbers import Grain


def decode(builder: Builder, x: Rows, clip: str | None) -> Rows:
    """Floats [M, N] as the values of a format without a fast product, under the clip of that name.

    x itself where it is rounded already, or nothing is.
    """
    if clip is None:
        return x
    name = clip.removesuffix("_clip")
    builder.activations[name] = x.tensor
    form = None if builder.quant.coded else builder.quant.activation_form(name)
    if form is None:
        return x
    bits, own = (-(-math.prod(x.floats.shape) // 8),), name + ".decoded"
    decoded = FakeQuantize(
        x=x.floats,
        clip=builder.parameter(
            clip, (1,), Kind.ACTIVATION_CLIP, start=builder.quant.activation_clip
        ),
        out=builder.like(own, x.floats),
        form=form,
        given=form.grain == Grain.TENSOR,
        clipped=builder.tensor(own + ".clipped", bits, torch.uint8) if builder.backward else None,
    )
    builder.activations[name] = builder.add(decoded).out
    return Rows(floats=decoded.out)


def grouped(builder: Builder, x: Rows, weight: str) -> GroupedCodes | None:
    """Decoded x [M, K] as int8 codes with scales of groups, where a product with the weight of that
    name takes them."""
    producer, form = (
        builder.producer(x.floats),
        None if builder.quant.coded else builder.quant.weight_form(weight),
    )
    if form is None or not isinstance(producer, FakeQuantize) or not builder.multiplies_groups:
        return None
    group = common_group(producer.form, form)
    if group is None:
        return None
    # what is beyond the last input would be multiplied, too
    group = min(group, -(-x.floats.shape[1] // STEP) * STEP)
    if producer.coded is None:
        rows, name, grain = x.floats.shape[0], x.floats.name, producer.form.grain
        producer.coded = GroupedCodes(
            codes=builder.tensor(name + ".codes", x.floats.shape, torch.int8),
            group=grain.columns or group,
            scale=builder.tensor(name + ".scale", (rows, grain.grid(x.floats.shape)[1])),
        )
    return producer.coded.regrouped(group)
