"""Training with number formats that have no fast product: floats become values of a format.

    out = decode(encode(clamp(x, -clip, clip)))

The gradient goes straight through inside the clip; outside, it goes to the clip (PACT, Choi et al.
2018, arXiv:1805.06085). With one scale per clip, scale = clip / largest value. Finer formats
measure a scale per block in every pass, from the block's largest magnitude inside the clip. If
scales are multiples of one scale for the tensor, the clip gives that scale. So values of a row
depend on other rows only if blocks have several rows. M rows, N columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from lsq.native import tiles
from lsq.ops.grouped_product import GroupedCodes, whole_factor
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.packed_weight import PackedWeight
from lsq.program.declare import Activations, Bits, Floats, Host, In, Key, Out, extent, factor, size
from lsq.program.operation import Operation
from lsq.program.values import Weight
from lsq.quant import GRADIENT, Format, arithmetic, pack_bits, unpack_bits
from lsq.quant.numbers import FloatScales, Grain, PowerScales, ScaledFormat
from lsq.quant.stored import field_bytes, stored_type
from lsq.quant.tables import lookup

STORED = {torch.float32: 0, torch.bfloat16: 1}
POWER, MULTIPLIED = 2, 3
"""Numbers of stored scales beside dtypes: powers of two, multiples of another scale."""


class FakeQuantize(Operation):
    """x [M, N], rounded to the values of a format."""

    x: In[Activations]  # [M, N]
    clip: In[Floats] | None  # [1], or [M] of a weight; None: nothing is clipped.
    out: Out[Activations]
    """[M, N]; NaN where x is, and where NaN or infinity enters a measured scale."""
    clipped: Out[Bits] | None  # |x| > clip, under one clip; for a backward pass.
    coded: Out[GroupedCodes] | None
    """`out` as int8 codes with a scale for each block of each row; on the CPU only."""
    ranked: Host[bool] = False
    """Whether codes are the ranks of values, as uint8; else they are whole values."""
    form: Host[ScaledFormat]
    given: bool = False  # Whether clips give the scales; else scales are measured.

    rows = extent(0, "x")
    columns = extent(1, "x")
    clips = extent(0, "clip")

    @size
    def block_rows(self) -> int:
        return self.form.grain.rows or self.rows

    @size
    def block_columns(self) -> int:
        return self.form.grain.columns or self.columns

    @size
    def stored(self) -> int:
        scales = self.form.scales
        if isinstance(scales, FloatScales):
            return STORED[scales.dtype]
        return POWER if isinstance(scales, PowerScales) else MULTIPLIED

    @size
    def each_row(self) -> bool:
        """Whether each row of scales has its own scale to multiply; else one for all."""
        return self.stored == MULTIPLIED and self.form.scales.grain.rows == 1

    @size
    def levels(self) -> int:
        """Address of the lookup table (lsq.quant.tables.lookup) of the number format."""
        return lookup(self.form.number, self.x.device).data_ptr()

    @size
    def multipliers(self) -> int:
        """Address of the lookup table of scales that are multiples; 0 for other scales."""
        if self.stored != MULTIPLIED:
            return 0
        return lookup(self.form.scales.number, self.x.device).data_ptr()

    @factor
    def largest(self) -> float:
        """The largest value of the format."""
        return self.form.number.largest

    @factor
    def whole(self) -> float:
        """Factor that makes the format's values whole: code = value / scale * whole; 0: ranks."""
        return float(whole_factor(self.form.number)) if self.coded and not self.ranked else 0.0

    @factor
    def largest_multiplier(self) -> float:
        return self.form.scales.number.largest if self.stored == MULTIPLIED else 0.0

    def unrounded(self, run) -> torch.Tensor:
        return self.x

    def rounding(self) -> FakeQuantize | None:
        return None if self.clip is None else self

    def reference(self):
        x, form, clipped = self.x.float(), self.form, None
        if self.clip is not None:
            limit = self.clip[:, None]
            clipped = pack_bits(x.abs() > limit) if self.clips == 1 else None
            x = torch.clamp(x, -limit, limit)
        missing, shape = x.isnan(), tuple(x.shape)
        if self.given:
            scales = (self.clip / form.number.largest).view(form.grain.grid(shape))
        else:
            scales = largest_magnitudes(x, form.grain) / form.number.largest
        scale = form.grain.spread(self._as_stored(scales), shape)
        steps = torch.where((scale == 0) | missing, 0.0, x / scale)
        levels = form.number.decode(form.number.encode(steps))
        values = torch.where(missing, torch.nan, levels * scale)
        coded = self.coded and self._codes(levels, scale.expand(shape), missing)
        return {"out": values, "clipped": clipped, "coded": coded}

    def _codes(self, levels, scale, missing) -> dict[str, torch.Tensor]:
        """Return codes [M, N] and the scales of the blocks of each row [M, G]."""
        of_blocks = scale[:, :: self.block_columns] / (self.whole or 1.0)
        if self.given:
            of_blocks = of_blocks.masked_fill(missing.any(1, keepdim=True), torch.nan)
        codes = (levels * self.whole).to(torch.int8)
        if self.ranked:
            values = torch.tensor(sorted({*filter(math.isfinite, self.form.number.values)}))
            codes = torch.searchsorted(values, levels).to(torch.uint8).view(torch.int8)
        return {"codes": codes, "scale": of_blocks}

    def _as_stored(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales [down, across] after storing and reading them."""
        stored = self.form.scales
        if self.clips == 1 and self.stored == MULTIPLIED and not self.each_row:
            return stored.decode(stored.encode(scales, self.clip / self.form.number.largest))
        return stored.decode(stored.encode(scales))

    def gradient(self, builder) -> None:
        arrived, producer = builder.gradient_of(self.out), builder.producer(self.x)
        if arrived is None:
            return
        found = FakeQuantizeGradient(
            gradient=arrived,
            out=self.out,
            clipped=self.clipped,
            nonlinearity=getattr(producer, "nonlinearity", None),
        )
        if producer is not None and producer.product_weight is not None:
            found.dx, _ = builder.product_gradient(self.x)
            found.sum = builder.bias_gradient(self.x)
        elif builder.needs_gradient(self.x):
            found.added = builder.take_gradient(self.x)
            found.dx = builder.like("d_" + self.x.name, self.x)
            builder.accumulate(self.x, found.dx)
        found.dclip = builder.parameter_gradient(self.clip)
        if found.outputs:
            builder.add(found)


class FakeQuantizeGradient(Operation):
    """The gradient of x; it also undoes the epilogue of the product that made x."""

    gradient: In[Activations]  # [M, N]
    out: In[Activations]  # [M, N], the values.
    clipped: In[Bits]
    nonlinearity: In[Nonlinearity] | None  # Of the product that made x.
    added: In[Activations] | None  # [M, N], another gradient of x.
    dx: Out[Activations] | None  # [M, N]
    sum: Out[Floats] | None  # [N], over rows: the gradient of a bias.
    dclip: Out[Floats] | None  # [1]

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    def reference(self):
        outside = unpack_bits(self.clipped, self.gradient.numel()).view(self.gradient.shape)
        across = torch.where(self.out > 0, self.gradient, -self.gradient)
        dx = torch.where(outside, 0.0, self.gradient)
        dx = dx if self.nonlinearity is None else self.nonlinearity.undo(dx)
        dx = dx if self.added is None else dx + self.added
        dclip = torch.where(outside, across, 0.0).sum().reshape(1)
        return {"dx": dx, "sum": dx.sum(dim=0), "dclip": dclip}


class RoundAtRandom(Operation):
    """A gradient [M, N] as integers times a scale for each row, rounded at random without bias."""

    x: In[Activations]  # [M, N]
    key: In[Key]  # [1]
    subsequence: int
    out: Out[Activations]  # [M, N]; NaN in a row that holds a NaN or an infinity.
    form: Host[Format] = GRADIENT

    rows = extent(0, "x")
    columns = extent(1, "x")

    @factor
    def largest(self) -> float:
        """Q, the largest code."""
        return float(self.form.largest)

    def reference(self):
        ones = torch.ones(self.columns, dtype=torch.float32)
        codes, scale = arithmetic.round_rows(
            self.x.float(), ones, self.key, self.subsequence, self.form.largest
        )
        return {"out": codes.float() * scale[:, None]}


def decode_weight(weight: Weight) -> FakeQuantize:
    """Return the operation that writes the decoded values [N, K] of a weight."""
    return FakeQuantize(
        x=weight.values_by_rows.contiguous(),
        clip=weight.clip,
        out=weight.decoded,
        form=weight.format,
        given=weight.format.grain.columns is None,
    )


def pack_weight(weight: Weight, run: Callable[[Operation], None]) -> None:
    """Write weight.grouped, and weight.decoded if it is there, from values and clip, on the CPU;
    `run` runs an operation there."""
    shape, stored = weight.values_by_rows.shape, stored_type(weight.format.number)
    if weight.decoded is None:
        decoded = torch.empty(shape, dtype=torch.float32)
        encoding = decode_weight(dataclasses.replace(weight, decoded=decoded))
    else:
        encoding = decode_weight(weight)
    codes = torch.empty(shape, dtype=torch.int8)
    scale = torch.empty(shape[0], weight.format.grain.grid(shape)[1], dtype=torch.float32)
    encoding.coded = GroupedCodes(codes=codes, scale=scale, group=weight.group)
    encoding.ranked = True
    run(encoding)
    if codes.numel():
        ranks = codes.view(torch.uint8)
        packed_groups(weight).fill(stored.stored(ranks), scale, stored.unit)


def packed_groups(weight: Weight) -> PackedWeight:
    """Return weight.grouped as products read it."""
    memory, stored = weight.grouped, stored_type(weight.format.number)
    scales = weight.format.grain.grid(weight.shape)[1]
    memory = memory[-memory.data_ptr() % tiles.ALIGNMENT :]
    size = field_bytes(weight.shape, stored, weight.group, scales)
    return PackedWeight.over(memory[:size], weight.shape, stored, weight.group, scales)


def fake_gradient(builder, gradient, form: Format | ScaledFormat | None):
    """Round a product's gradient: at random to a Format, to the nearest value to a ScaledFormat."""
    if form is None:
        return gradient
    out = builder.like(gradient.name + ".decoded", gradient)
    if isinstance(form, Format):
        random = {"key": builder.key, "subsequence": builder.next_subsequence()}
        builder.add(RoundAtRandom(x=gradient, **random, out=out, form=form))
    else:
        builder.add(FakeQuantize(x=gradient, out=out, form=form))
    return out


def largest_magnitudes(x: torch.Tensor, grain: Grain) -> torch.Tensor:
    """Return the largest magnitude of each block of x [M, N]; NaN where a value is not finite."""
    shape = tuple(x.shape)
    blocks, _ = grain.split(x)
    largest = blocks.abs().amax(1).view(grain.grid(shape))
    return torch.where(largest.isfinite(), largest, torch.nan)
