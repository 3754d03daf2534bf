"""The builder of layers: it knows the formats, and which operations round a value in each.

Blocks (lsq.layers.blocks) say which value is rounded under which clip. There are three cases:

* codes: products read int8 codes (or int4 weights); operations round what they write (`Coded`);
* values of a format without a fast product: operations write floats, and a FakeQuantize behind each
  turns them into values of the format;
* float mode: nothing is rounded and there are no clips.
"""

import math
from dataclasses import dataclass

import torch

from lsq.ops.fake_quantize import FakeQuantize
from lsq.ops.grouped_product import STEP, GroupedCodes, common_group
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.residual_norm import NormalisedRows
from lsq.ops.rounding import Add, Round, unpacked
from lsq.ops.sums import finish_together, start_together
from lsq.program.builder import Builder
from lsq.program.operation import Operation
from lsq.program.parameters import Kind
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Rows, Weight
from lsq.quant import NORMALISED
from lsq.quant.numbers import Grain


@dataclass(frozen=True, kw_only=True)
class Result:
    """A value [M, N] that one operation writes and others read."""

    out: VirtualTensor | None
    """The value as written in floats."""
    rounded: Coded | None
    """The value as written in codes."""
    rows: Rows
    """The value as it is read."""


class LayerBuilder(Builder):
    """Builds programs of layers; see the module."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._waiting: dict[VirtualTensor, tuple[str, VirtualTensor]] = {}
        """By floats that are not written yet: the clip of their values in a format, and those."""

    def add(self, operation: Operation) -> Operation:
        super().add(operation)
        for tensor in operation.outputs:
            if tensor in self._waiting:
                self._add_values(tensor, *self._waiting.pop(tensor))
        return operation

    # Activations

    def result(
        self,
        name: str,
        shape: tuple[int, int],
        clip: str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        floats: bool = False,
        by_row: bool = False,
    ) -> Result:
        """A value of that name, rounded under a clip if it has one and anything is rounded.

        Args:
            name: of floats.
            shape: [M, N].
            clip: its name; the value's name and _clip.
            dtype: of floats.
            floats: whether floats are wanted beside codes.
            by_row: see Builder.coded.
        """
        rounded = None
        if clip is not None and self.quant.coded:
            rounded = self.coded(clip.removesuffix("_clip"), shape, clip, by_row=by_row)
        out = self.tensor(name, shape, dtype) if floats or rounded is None else None
        if rounded is not None:
            return Result(out=out, rounded=rounded, rows=Rows(coded=rounded))
        values = self._values_of(out, clip)
        if values is not out:
            self._waiting[out] = clip, values
        return Result(out=out, rounded=None, rows=Rows(floats=values))

    def round(self, x: VirtualTensor, clip: str) -> Rows:
        """x [M, N], which is there already, rounded under the clip of that name."""
        if self.quant.coded:
            rounded = self.coded(clip.removesuffix("_clip"), x.shape, clip)
            self.add(Round(x=x, rounded=rounded))
            return Rows(coded=rounded)
        values = self._values_of(x, clip)
        if values is not x:
            self._add_values(x, clip, values)
        return Rows(floats=values)

    def _values_of(self, x: VirtualTensor, clip: str | None) -> VirtualTensor:
        """A tensor for the values of floats in the format of their clip; x where there is none."""
        if clip is None:
            return x
        name = clip.removesuffix("_clip")
        form = self.quant.activation_form(name)
        values = self.activations[name] = x if form is None else self.like(name + ".decoded", x)
        return values

    def _add_values(self, x: VirtualTensor, clip: str, values: VirtualTensor) -> None:
        form, clipped = self.quant.activation_form(clip.removesuffix("_clip")), None
        if self.backward:
            bits = (-(-math.prod(x.shape) // 8),)
            clipped = self.tensor(values.name + ".clipped", bits, torch.uint8)
        limit = self.parameter(clip, (1,), Kind.ACTIVATION_CLIP, start=self.quant.activation_clip)
        super().add(
            FakeQuantize(
                x=x,
                clip=limit,
                out=values,
                form=form,
                given=form.grain == Grain.TENSOR,
                clipped=clipped,
            )
        )

    def kept_rows(self, tensor: VirtualTensor, scale: VirtualTensor | None) -> Rows:
        """Rows that an earlier program wrote: codes under a scale, or floats."""
        if not self.quant.coded:
            return Rows(floats=tensor)
        return Rows(coded=Coded(format=self.quant.activations, codes=tensor, scale=scale))

    # What the backward pass finds

    @property
    def keeps_codes(self) -> bool:
        """Whether the backward pass finds slopes and normalised rows as codes."""
        return self.backward and self.quant.coded

    @property
    def rounds_gradients(self) -> bool:
        """Whether gradients of products become codes."""
        return self.keeps_codes and self.quant.backward == "int8"

    def nonlinearity(
        self, name: str, shape: tuple[int, int], activation: Activation, dropout: float
    ) -> Nonlinearity | None:
        """Activation and dropout of a product [M, N], with what undoes them; None without both."""
        found = Nonlinearity(activation=activation, dropout=self.dropout(dropout))
        if activation is Activation.none:
            return None if found.dropout is None else found
        if self.backward and activation is Activation.relu:
            bits = (-(-math.prod(shape) // 8),)
            found.positive = self.tensor(name + ".positive", bits, torch.uint8)
        elif self.keeps_codes and activation.bounded_slope:
            found.slope = self.tensor(name + ".slope", shape, torch.int8)
        elif self.backward:
            found.before = self.tensor(name + ".before", shape)
        return found

    def normalised(self, name: str, shape: tuple[int, int]) -> NormalisedRows | None:
        """Codes of normalised rows [M, N] for the backward pass, if it reads codes."""
        if not self.keeps_codes:
            return None
        return NormalisedRows(
            format=NORMALISED,
            codes=self.tensor(name + ".normalised", shape, NORMALISED.storage),
            scale=self.tensor(name + ".normalised.scale", shape[:1]),
        )

    # Products

    def operands(self, x: Rows, weight: str, shape: tuple[int, int], **options) -> dict:
        """The fields x, weight and groups of a Project: x [M, K] and a weight `shape` [N, K].

        options: see `weight`.
        """
        form = None if self.quant.coded else self.quant.weight_form(weight)
        groups = None if form is None else self._groups(x, form)
        stored = self.weight(weight, shape, group=groups.group if groups else 0, **options)
        if groups is not None and stored.group != groups.group:
            groups = None
        return {"x": x, "weight": unpacked(self, stored, x.tensor.shape[0]), "groups": groups}

    def _groups(self, x: Rows, form) -> GroupedCodes | None:
        """Decoded x [M, K] as int8 codes with scales of groups, where products with weights of a
        format read those: weights that stay, on the CPU."""
        producer = self.producer(x.floats)
        if not self.multiplies_groups or not isinstance(producer, FakeQuantize):
            return None
        group = common_group(producer.form, form)
        if group is None:
            return None
        # what is beyond the last input would be multiplied, too
        group = min(group, -(-x.floats.shape[1] // STEP) * STEP)
        if producer.coded is None:
            rows, name, grain = x.floats.shape[0], x.floats.name, producer.form.grain
            producer.coded = GroupedCodes(
                codes=self.tensor(name + ".codes", x.floats.shape, torch.int8),
                group=grain.columns or group,
                scale=self.tensor(name + ".scale", (rows, grain.grid(x.floats.shape)[1])),
            )
        return producer.coded.regrouped(group)

    def unpacked_weight(self, name: str, shape: tuple[int, int], **options) -> Weight:
        """A weight as products of many rows read it; options: see `weight`."""
        return unpacked(self, self.weight(name, shape, **options))

    # Of whole passes

    def make_add(self, a: VirtualTensor, b: VirtualTensor, total: VirtualTensor) -> Operation:
        return Add(a=a, b=b, out=total)

    def first_operations(self, forward):
        return start_together(forward) if self._backend.starts_scales else ()

    def last_operations(self, backward):
        return finish_together(backward, self.tensor) if self._backend.leaves_sums else ()
