"""The middle of a gated feed-forward block.

    result = dropout(activation(gate) * up)   as floats, or rounded once, under a clip or by row

(Gated linear units, Dauphin et al. 2017; with SiLU or GELU: SwiGLU and GEGLU, Shazeer 2020.) Gate
and up are codes, each under its own clip. The backward pass needs nothing else (docs/numbers.md). M
rows, F columns, a multiple of 8 where the result is rounded.
"""

from __future__ import annotations

import torch

from lsq.native.launch import FLOATS, check
from lsq.ops.nonlinearity import Activation
from lsq.ops.sums import SummedGradient
from lsq.program.declare import Activations, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, Rows, dropped


class Gated(Operation):
    """The operation dropout(activation(gate) * up) [M, F].

    Raises:
        ValueError: gate is rounded and up is not, or the reverse.
    """

    gate: In[Rows]  # [M, F]
    up: In[Rows]  # [M, F]
    activation: Activation  # Applied to the gate.
    dropout: In[Dropout] | None
    out: Out[Activations] | None  # [M, F]
    rounded: Out[Coded] | None  # [M, F]

    rows = extent(0, "gate.tensor")
    columns = extent(1, "gate.tensor")

    @size
    def count(self) -> int:
        return self.rows * self.columns

    def __post_init__(self):
        _check_same(self.gate, self.up)

    def reference(self):
        gate = Activation(self.activation).values(_values(self.gate))
        result = dropped(gate * _values(self.up), self.dropout)
        return {"out": result, "rounded": self.rounded and self.rounded.encode(result)}

    def gradient(self, builder) -> None:
        result = self.out if self.rounded is None else self.rounded.codes
        dgate, dup = (SummedGradient.of(rows, builder) for rows in (self.gate, self.up))
        builder.add(
            GatedGradient(
                gradient=builder.gradient_of(result),
                gate=self.gate,
                up=self.up,
                activation=self.activation,
                dropout=self.dropout,
                dgate=dgate,
                dup=dup,
            )
        )


class GatedGradient(Operation):
    """The gradients of gate and up, each under the straight-through mask of its own rounding."""

    gradient: In[Activations]  # [M, F], before the rounding; float32 or bfloat16 on every device.
    gate: In[Rows]  # [M, F]
    up: In[Rows]  # [M, F]
    activation: Activation
    dropout: In[Dropout] | None
    dgate: Out[SummedGradient]
    dup: Out[SummedGradient]

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    @size
    def gradient_dtype(self) -> int:
        return FLOATS[self.gradient.dtype]

    def __post_init__(self):
        _check_same(self.gate, self.up)

    def reference(self):
        kind, gradient = Activation(self.activation), dropped(self.gradient.float(), self.dropout)
        gate, up = _values(self.gate), _values(self.up)
        of_gate, of_up = gradient * up * kind.slope(gate), gradient * kind.values(gate)
        return {
            "dgate": self.dgate.encode(of_gate, self.gate.coded),
            "dup": self.dup.encode(of_up, self.up.coded),
        }


def _values(rows: Rows) -> torch.Tensor:
    return rows.floats if rows.coded is None else rows.coded.decode()


def _check_same(gate: Rows, up: Rows) -> None:
    both = (gate.coded is None) == (up.coded is None)
    check(both, "one of gate and up is codes and the other floats; round both or none")
