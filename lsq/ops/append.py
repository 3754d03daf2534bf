"""Keys and values of one more step of generation behind those of the steps before."""

from __future__ import annotations

import torch

from lsq.program.declare import Activations, Codes, In, Out, extent, size
from lsq.program.operation import Operation


class Append(Operation):
    """The rows of B sentences of P rows each, with one more row in each: of codes, or of floats in
    float mode."""

    before: In[Codes] | None
    """[B * P, W]"""
    now: In[Codes] | None
    """[B, W]"""
    before_floats: In[Activations] | None
    now_floats: In[Activations] | None
    batch: int
    """B"""
    out: Out[Codes] | None
    """[B * (P + 1), W]"""
    out_floats: Out[Activations] | None

    @property
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            (self.before_floats, self.now_floats)
            if self.before is None
            else (self.before, self.now)
        )

    @size
    def past(self) -> int:
        """P."""
        return self._operands[0].shape[0] // max(1, self.batch)

    columns = extent(1, "now", "now_floats")
    """W."""

    def reference(self):
        before, now = self._operands
        rows = [
            before.view(self.batch, self.past, self.columns),
            now.view(self.batch, 1, self.columns),
        ]
        out = torch.cat(rows, dim=1).view(-1, self.columns)
        return {"out": out, "out_floats": out}
