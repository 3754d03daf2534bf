"""Scales that a pass writes in one launch at its beginning, and sums over rows added up at its end.

Blocks of a GPU leave partial sums. Each of B blocks leaves a row: S sums over N columns side by
side, then numbers for the clip. FinishSums adds up all parts of a pass. CPU loops finish their
sums.

The scale under a clip is known before the rounding, unless a rounded value is NaN. So StartScales
writes all scales of a pass, and a block that meets a NaN overwrites its scale. The scales of the
rows of a gated block are not known before.
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

    parts: In[Floats]  # [B, W], W at least S * N, plus `clip_parts` if there is a clip.
    first: Floats | None  # [N]
    second: Floats | None
    third: Floats | None
    clip: Floats | None  # [1], summed in double precision, times `factor`.
    sums: int  # S, up to 3.
    columns: int  # N.
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
        """Make sums of `columns` columns for `totals` (None: not wanted); `coded` has the clip."""
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
        """Make sums for a weight's clips: columns if rows have clips, else one number."""
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
        """Reference: parts that add up to the totals, all in the first row; None without parts."""
        if self.parts is None:
            return None
        made, (*sums, clip) = torch.zeros_like(self.parts), self.totals
        for number, total in enumerate(sums[: self.sums]):
            made[0, number * self.columns : (number + 1) * self.columns] = total
        if clip is not None:
            made[0, self.sums * self.columns] = clip / self.factor
        return made


class FinishSums(Operation):
    """The last operation of a pass: it adds up the parts."""

    sums: Out[Array[PartialSums, 20]]  # A decoder layer has 7 to 23, in up to two operations.

    def reference(self):
        return {"sums": [partial.add_up() for partial in self.sums]}


def finish_together(
    operations: Iterable[Operation], tensor: Callable[..., VirtualTensor]
) -> list[Operation]:
    """Let virtual `operations` of a pass leave partial sums; return operations that add these up.

    `tensor`: makes a virtual tensor of a name, a shape and a dtype.
    """
    left = [partial for operation in operations for partial in operation.leave_sums(tensor)]
    return _together(FinishSums, left)


def _together(operation: type[Operation], values: list) -> list[Operation]:
    """Return as many operations as `values` need: their one field is an array."""
    (field,) = operation.fields
    firsts = range(0, len(values), field.count)
    return [operation(**{field.name: values[first : first + field.count]}) for first in firsts]


class SummedGradient(Value):
    """The gradient [M, C] of a product's result, as floats or rounded, and its sums over rows."""

    floats: Activations | None  # [M, C]
    rounded: RoundedGradient | None  # The gradient, rounded.
    sum: Floats | None  # [C], over rows: the gradient of the product's bias.
    clip: Floats | None  # [1], the gradient of the tensor's clip.
    parts: Floats | None  # Parts of `sum` and `clip`, in place of these.

    @classmethod
    def of(cls, rows: Rows, builder) -> SummedGradient:
        """Make fields for the gradient of `rows` in a Builder's program."""
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
        """Return the sums that a kernel leaves in `parts`."""
        return PartialSums.of(parts, columns, (self.sum,), self.clip, coded)


class StartScales(Operation):
    """The first operation of a pass: it writes scales."""

    scales: Out[Array[StartedScale, 16]]  # A decoder layer has 10 to 12.

    def reference(self):
        return {"scales": [{"scale": scale.clip / scale.largest} for scale in self.scales]}


def start_together(operations: Iterable[Operation]) -> list[Operation]:
    """Let all `operations` of a pass read written scales; return the operations that write them."""
    every = (operation.rounding() for operation in operations)
    coded = [rounded for rounded in every if isinstance(rounded, Coded) and not rounded.by_row]
    for rounded in coded:
        rounded.started = True
    return _together(StartScales, [rounded.started_scale for rounded in coded])
