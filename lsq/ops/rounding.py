"""Rounding of activations, of weights, of the gradient of a product; and the sum of two gradients.

By convention, the gradient of codes is the gradient *before* the rounding: the reader of the codes
applies the straight-through mask and makes the gradient of the clip. M rows, N columns; a weight
has N rows (output channels) and K columns.
"""

from __future__ import annotations

import dataclasses

import torch

from lsq.native import loader
from lsq.native.launch import FLOATS
from lsq.ops.sums import PartialSums
from lsq.program.declare import Activations, Codes, Floats, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Weight
from lsq.quant import largest_clips


class Round(Operation):
    """An activation as codes under its clip."""

    x: In[Activations]  # [M, N]; float32 or bfloat16, on the CPU too.
    rounded: Out[Coded]  # [M, N]

    @size
    def count(self) -> int:
        return self.x.numel()

    @size
    def x_dtype(self) -> int:
        return FLOATS[self.x.dtype]

    def unrounded(self, run) -> torch.Tensor:
        return self.x

    @property
    def same_values(self):
        return self.x, self.rounded.codes

    def reference(self):
        return {"rounded": self.rounded.encode(self.x.float())}

    def gradient(self, builder) -> None:
        builder.accumulate(self.x, builder.gradient_of(self.rounded.codes))


class RoundWeight(Operation):
    """The codes of a weight from its values and clips."""

    weight: Out[Weight]
    """values [N, K] or [K, N], clip [N] or [1] -> codes [P, K] as stored, scale [P], on a GPU also
    codes transposed. Rows from N on are 0, with scale 1."""
    new_clip: Out[Floats] | None
    """[N], new clips, the largest magnitudes of rows; in the memory of the old clips."""

    rows = extent(0, "weight.codes")  # P.
    stored = extent(1, "weight.codes")  # Bytes of a row.
    clips = extent(0, "weight.clip")

    @size
    def valid(self) -> int:
        """N."""
        return self.weight.values.shape[self.weight.in_out]

    @size
    def columns(self) -> int:
        """K."""
        return self.weight.values.shape[1 - self.weight.in_out]

    def reference(self):
        weight, padding = self.weight, self.rows - self.valid
        values, clip = weight.values_by_rows, weight.clip
        clip = clip if self.new_clip is None else largest_clips(values, clip)
        codes, scale = weight.format.encode(values, clip)
        return {"weight": padded_codes(codes, scale, padding), "new_clip": clip}

    def cpu(self):
        loader.call(f"lsq_round_{self.weight.format.name}", self)


def padded_codes(codes: torch.Tensor, scale: torch.Tensor, padding: int) -> dict:
    """Reference: the written fields of a weight, with `padding` rows of 0 and scale 1 behind it."""
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
    scale = torch.nn.functional.pad(scale, (0, padding), value=1.0)
    return {"codes": codes, "scale": scale, "transposed": codes.t()}


class UnpackWeight(Operation):
    """The unpacked codes of a weight in a packed format."""

    weight: In[Weight]  # [P, stored columns]
    codes: Out[Codes]  # [P, K]

    rows = extent(0, "codes")  # P.
    columns = extent(1, "codes")  # K.
    stored = extent(1, "weight.codes")  # Bytes of a row.

    def reference(self):
        return {"codes": self.weight.format.unpack(self.weight.codes, self.columns)}

    def cpu(self):
        loader.call(f"lsq_unpack_{self.weight.format.name}", self)

    def gradient(self, builder) -> None:
        """Append nothing: products append the gradient of the weight."""


def unpacked(builder, weight: Weight, rows: int | None = None) -> Weight:
    """Return the weight as the next product reads it; each pass unpacks it anew.

    `rows`: rows of x, for a product that reads the stored weight if rows are few.
    """
    stored = builder.stored(weight)
    few = rows is not None and rows <= builder.packed_rows
    if stored.codes is None or not stored.format.packed or few:
        return stored
    shape = stored.codes.shape[0], stored.values.shape[1]
    codes = builder.tensor(stored.codes.name + ".unpacked", shape, torch.int8)
    builder.add(UnpackWeight(weight=stored.bare(), codes=codes))
    return dataclasses.replace(stored, codes=codes, format=stored.format.unpacked)


class RoundGradient(Operation):
    """The gradient of a product at the end of a program, for its backward products."""

    gradient: In[Activations]  # [M, N]; float32 or bfloat16, on the CPU too.
    rounded: Out[RoundedGradient] | None  # [M, N]; None: the backward products read floats.
    sum: Out[Floats] | None  # [N], over rows: the gradient of the product's bias.
    parts: Out[Floats] | None  # Parts of `sum`, in its place; see lsq.ops.sums.

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    @size
    def gradient_dtype(self) -> int:
        return FLOATS[self.gradient.dtype]

    def reference(self):
        gradient = self.gradient.float()
        total = gradient.sum(dim=0)
        return {
            "rounded": self.rounded and self.rounded.encode(gradient),
            "sum": total,
            "parts": PartialSums.of(self.parts, self.columns, (total,)).as_parts(),
        }


class Add(Operation):
    """The sum a + b of two gradients of one tensor."""

    a: In[Activations]  # Any shape.
    b: In[Activations]
    out: Out[Activations]

    @size
    def count(self) -> int:
        return self.out.numel()

    def reference(self):
        return {"out": self.a + self.b}
