"""The gradient of what a product wrote, where an operation writes it, with its sums over rows for
bias and clip.

M rows, C columns, as the tensor has whose gradient it is.
"""

from __future__ import annotations

import torch

from lsq.ops.sums import PartialSums, as_parts, parts_of
from lsq.program.declare import Activations, Floats, Value
from lsq.program.values import Coded, RoundedGradient, Rows


class SummedGradient(Value):
    """A gradient as floats or rounded, and what it comes to over all rows."""

    floats: Activations | None
    """[M, C]"""
    rounded: RoundedGradient | None
    """The same, rounded."""
    sum: Floats | None
    """[C], over rows: the gradient of the product's bias."""
    clip: Floats | None
    """[1], of the clip under which the tensor was rounded."""
    parts: Floats | None
    """Of `sum` and `clip`, in place of these; see lsq.ops.sums."""

    @classmethod
    def of(cls, rows: Rows, builder) -> SummedGradient:
        """Where the gradient of those rows goes in a program of a lsq.program.builder.Builder."""
        floats, rounded = builder.product_gradient(rows.tensor)
        return cls(
            floats=floats,
            rounded=rounded,
            sum=builder.bias_gradient(rows.tensor),
            clip=builder.parameter_gradient(rows.clip),
        )

    def encode(self, gradient: torch.Tensor, coded: Coded | None) -> tuple:
        """Reference: what the written fields hold of the gradient [M, C] of codes * scale, or of
        floats."""
        clip = torch.zeros(1, dtype=torch.float32)
        if coded is not None:
            gradient, clip = coded.straight_through(gradient)
        rounded = self.rounded.encode(gradient) if self.rounded is not None else (None, None)
        sums = gradient.sum(dim=0), clip
        return (
            gradient,
            *rounded,
            *sums,
            as_parts(self.parts, self.sums(self.parts, gradient.shape[1], coded, *sums)),
        )

    def sums(self, parts, columns: int, coded: Coded | None, *totals) -> PartialSums:
        """What a kernel leaves in `parts`; `totals`: the sums where they are known."""
        total, clip = totals or (self.sum, self.clip)
        return PartialSums.of(parts, columns, (total,), clip, coded)

    def leave_sums(self, tensor, rows: int, columns: int, coded: Coded | None) -> list[PartialSums]:
        """See Operation.leave_sums."""
        name = (self.floats if self.rounded is None else self.rounded.codes).name
        found = self.sums(tensor(name + ".parts", *parts_of(rows, columns, 1)), columns, coded)
        if not found.wanted:
            return []
        self.parts, self.sum, self.clip = found.parts, None, None
        return [found]
