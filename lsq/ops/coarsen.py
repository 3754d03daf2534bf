"""Codes of fewer bits for some rows, such as those of nodes of a graph, in the scale of all rows.

Codes of b bits lie in -Q_b..Q_b, Q_b = 2^(b-1) - 1. A row of b bits holds multiples of its unit,
floor(Q / Q_b): 1 for b bits of the format itself, whose codes stay. So sums over rows stay exact.
"""

from __future__ import annotations

import torch

from lsq.program.declare import Codes, In, Out, extent
from lsq.program.operation import Operation


class CoarsenRows(Operation):
    """The codes of row m as unit[m] * clamp(round(code / unit[m]), -Q_b, Q_b).

    Programs coarsen codes in place: what made them still undoes the gradient that their reader
    makes, as if they had been rounded once.
    """

    codes: In[Codes]  # [M, N]
    unit: In[Codes]  # [M], from 1 to Q; Q_b = floor(Q / unit).
    coarse: Out[Codes]  # [M, N], may be the memory of `codes`.
    largest: int  # Q

    rows = extent(0, "codes")
    columns = extent(1, "codes")

    def reference(self):
        unit = self.unit[:, None]
        most = self.largest // unit
        steps = (self.codes / unit).round().clamp(-most, most)
        return {"coarse": (steps * unit).to(torch.int8)}

    def gradient(self, builder) -> None:
        """Append nothing: the gradient goes straight through."""
