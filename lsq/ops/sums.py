"""Scales that one launch writes at the beginning of a pass, and sums over rows that one finishes.

Blocks of a GPU leave their sums in parts: each of B blocks a row with S sums over N columns side by
side, then numbers for the clip. FinishSums adds up all parts of a pass. Loops of the CPU finish
their sums themselves.

The scale of what is rounded under a clip is known beforehand, unless a rounded value is NaN. So
StartScales writes all scales of a pass, and a block that meets a NaN overwrites its scale. The
scale of a row of a gated block is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from lsq.program.declare import Activations, Array, Floats, In, Out, Value, extent
from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, RoundedGradient, Rows, StartedScale


class PartialSums(Value):
    """Sums of the blocks of one kernel, and the tensors of their totals."""

    parts: In[Floats]  # [B, W], W at least S * N, and `clip_parts` more where there is a clip.
    first: Floats | None  # [N]
    second: Floats | None
    third: Floats | None
    clip: Floats | None  # [1], taken in double precision, times `factor`.
    sums: int  # S, up to 3.
    columns: int  # N
    factor: float = 1.0
    clip_parts: int = 1  # Numbers for the clip in each row.

    blocks = extent(0, "parts")
    width = extent(1, "parts")

    @classmethod
    def of(
        cls,
        parts,
        columns: int,
        totals: Sequence,
        clip=None,
        coded: Coded | None = None,
        clip_parts: int = 1,
    ) -> PartialSums:
        """Of `columns` columns, to `totals` (None: nowhere); `coded` has the clip."""
        first, second, third = (*totals, None, None, None)[:3]
        return cls(
            parts=parts,
            first=first,
            second=second,
            third=third,
            clip=clip,
            sums=len(totals),
            columns=columns,
            factor=1.0 if coded is None else coded.clip_factor,
            clip_parts=clip_parts,
        )

    @classmethod
    def of_clips(cls, parts, clips: int, dclip: torch.Tensor | None) -> PartialSums:
        """Gradients of a weight's clips: columns where rows have clips, else one number."""
        return cls.of(parts, clips, (dclip,)) if clips > 1 else cls.of(parts, 0, (), dclip)

    @property
    def totals(self) -> tuple:
        return self.first, self.second, self.third, self.clip

    @property
    def wanted(self) -> bool:
        return any(total is not None for total in self.totals)

    def add_up(self) -> dict[str, torch.Tensor]:
        """Reference: the written fields."""
        whole, names = self.parts.sum(dim=0), ("first", "second", "third")[: self.sums]
        results = dict(zip(names, whole.split(self.columns or 1), strict=False))
        begin = self.sums * self.columns
        numbers = self.parts[:, begin : begin + self.clip_parts].double()
        return results | {"clip": (numbers.sum() * self.factor).float()}

    def as_parts(self) -> torch.Tensor | None:
        """Reference: parts that come to the totals, all in the first row; None without parts."""
        if self.parts is None:
            return None
        made, (*sums, clip) = torch.zeros_like(self.parts), self.totals
        for number, total in enumerate(sums[: self.sums]):
            made[0, number * self.columns : (number + 1) * self.columns] = total
        if clip is not None:
            made[0, self.sums * self.columns] = clip / self.factor
        return made


class FinishSums(Operation):
    """Adds up the parts of a pass: its last operation."""

    sums: Out[Array[PartialSums, 20]]  # As many as a layer of a decoder has.

    def reference(self):
        return {"sums": [partial.add_up() for partial in self.sums]}


def finish_together(
    operations: Iterable[Operation], tensor: Callable[..., VirtualTensor]
) -> list[Operation]:
    """Let virtual `operations` of a pass leave their sums; return what finishes them.

    `tensor`: makes a virtual tensor of a name, a shape and a dtype.
    """
    left = [partial for operation in operations for partial in operation.leave_sums(tensor)]
    return _together(FinishSums, left)


def _together(operation: type[Operation], values: list) -> list[Operation]:
    """Operations whose one field is an array of so many values."""
    (field,) = operation.fields
    firsts = range(0, len(values), field.count)
    return [operation(**{field.name: values[first : first + field.count]}) for first in firsts]


class SummedGradient(Value):
    """The gradient [M, C] of what a product wrote, as floats or rounded, and its sums over rows."""

    floats: Activations | None  # [M, C]
    rounded: RoundedGradient | None  # The gradient, rounded.
    sum: Floats | None  # [C], over rows: the gradient of the product's bias.
    clip: Floats | None  # [1], of the clip under which the tensor was rounded.
    parts: Floats | None  # Parts of `sum` and `clip`, in place of these.

    @classmethod
    def of(cls, rows: Rows, builder) -> SummedGradient:
        """Fields that receive the gradient of `rows` in a Builder's program."""
        floats, rounded = builder.product_gradient(rows.tensor)
        return cls(
            floats=floats,
            rounded=rounded,
            sum=builder.bias_gradient(rows.tensor),
            clip=builder.parameter_gradient(rows.clip),
        )

    def encode(self, gradient: torch.Tensor, coded: Coded | None) -> dict:
        """Reference: the written fields, from the gradient of codes * scale or of floats."""
        clip = torch.zeros(1, dtype=torch.float32)
        if coded is not None:
            gradient, clip = coded.straight_through(gradient)
        total = gradient.sum(dim=0)
        partial = PartialSums.of(self.parts, gradient.shape[1], (total,), clip, coded)
        return {
            "floats": gradient,
            "rounded": self.rounded and self.rounded.encode(gradient),
            "sum": total,
            "clip": clip,
            "parts": partial.as_parts(),
        }

    def partial(self, parts, columns: int, coded: Coded | None) -> PartialSums:
        """The sums that a kernel leaves in `parts`."""
        return PartialSums.of(parts, columns, (self.sum,), self.clip, coded)


class StartScales(Operation):
    """Writes the scales of a pass: its first operation."""

    scales: Out[Array[StartedScale, 16]]  # A layer of a decoder has 10.

    def reference(self):
        return {"scales": [{"scale": scale.clip / scale.largest} for scale in self.scales]}


def start_together(operations: Iterable[Operation]) -> list[Operation]:
    """Let all `operations` of a pass find their scales written; return what writes them."""
    every = (operation.rounding() for operation in operations)
    coded = [rounded for rounded in every if isinstance(rounded, Coded) and not rounded.by_row]
    for rounded in coded:
        rounded.started = True
    return _together(StartScales, [rounded.started_scale for rounded in coded])
