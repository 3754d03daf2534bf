"""The middle of a gated feed-forward block: one product of its rows decides how much of another one
goes on.

    result = dropout(activation(gate) * up)      as floats, or rounded once to codes, under a clip
    or by row

(Gated linear units, Dauphin et al. 2017; with SiLU or GELU: SwiGLU and GEGLU, Shazeer 2020.) Gate
and up are codes as
their products rounded them, each under its own clip, and the backward pass needs nothing else: what
keeping more would gain stands in docs/numbers.md. M rows, F columns, a multiple of 8 where anything
is rounded.
"""

from __future__ import annotations

import torch

from lsq.native import geometry
from lsq.native.geometry import MANY_BLOCKS, THREADS, VECTOR, row_defines
from lsq.native.launch import FLOATS, TICKET, Launch, check, float_define, launch
from lsq.ops.kernels import check_columns
from lsq.ops.nonlinearity import Activation
from lsq.ops.scales import started
from lsq.ops.summed_gradient import SummedGradient
from lsq.ops.sums import finish, parts_of
from lsq.program.declare import Activations, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, Rows, dropped

VECTORS = 2
"""Of 8 values: what a thread of lsq_gated makes."""


class Gated(Operation):
    """dropout(activation(gate) * up) [M, F].

    Raises:
        ValueError: one of gate and up is rounded, the other is not.
    """

    gate: In[Rows]
    """[M, F]"""
    up: In[Rows]
    """[M, F]"""
    activation: Activation
    """Of the gate."""
    dropout: In[Dropout] | None
    out: Out[Activations] | None
    """[M, F]"""
    rounded: Out[Coded] | None
    """[M, F]"""

    rows = extent(0, "gate.tensor")
    columns = extent(1, "gate.tensor")

    @size
    def count(self) -> int:
        return self.rows * self.columns

    def __post_init__(self):
        _check_same(self.gate, self.up)

    def reference(self):
        result = dropped(
            Activation(self.activation).values(_values(self.gate)) * _values(self.up), self.dropout
        )
        return result, *(self.rounded.encode(result) if self.rounded is not None else (None,) * 5)

    def cuda(self):
        check_columns(VECTOR, **{"the width of a gate": self.columns})
        if self.rounded is not None and self.rounded.by_row:
            grid, line = geometry.strided(self.rows, MANY_BLOCKS), 4 * self.columns
            return [
                launch(
                    "gated.cu",
                    "lsq_gated_rows",
                    self,
                    grid=grid,
                    shared=line,
                    **_defines(self, self.out),
                )
            ]
        return [
            launch(
                "gated.cu",
                "lsq_gated",
                self,
                TICKET,
                grid=max(1, -(-self.count // (VECTORS * VECTOR * THREADS))),
                **_defines(self, self.out),
                **started(self.rounded),
            )
        ]

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
    """The gradients of gate and up, each with the straight-through mask of its own rounding."""

    gradient: In[Activations]
    """[M, F], of the result before its rounding; of either dtype, on the CPU too."""
    gate: In[Rows]
    """[M, F]"""
    up: In[Rows]
    """[M, F]"""
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

    @property
    def _sides(self) -> list[tuple[Rows, SummedGradient]]:
        return [(self.gate, self.dgate), (self.up, self.dup)]

    def reference(self):
        kind, gradient = Activation(self.activation), dropped(self.gradient.float(), self.dropout)
        gate, up = _values(self.gate), _values(self.up)
        of_gate, of_up = gradient * up * kind.slope(gate), gradient * kind.values(gate)
        return *self.dgate.encode(of_gate, self.gate.coded), *self.dup.encode(of_up, self.up.coded)

    def leave_sums(self, tensor):
        return [
            left
            for rows, end in self._sides
            for left in end.leave_sums(tensor, self.rows, self.columns, rows.coded)
        ]

    def cuda_scratch(self):
        return [parts_of(self.rows, self.columns, 1) for _, end in self._sides if end.parts is None]

    def cuda(self, *scratch):
        left, entries = iter(scratch), []
        for number, (rows, end) in enumerate(self._sides):
            partial = next(left) if end.parts is None else end.parts
            entries.append(self._side(number, end, partial))
            entries += finish(
                end.sums(partial, self.columns, rows.coded), leaves=end.parts is not None
            )
        return entries

    def _side(self, number: int, end: SummedGradient, partial: torch.Tensor) -> Launch:
        return launch(
            "gated_gradient.cu",
            "lsq_gated_gradient",
            self,
            partial,
            grid=len(partial),
            UP=number,
            ROUNDED=int(end.rounded is not None),
            **_defines(self, self.gradient, end.floats),
            **row_defines(self.columns),
        )


def _values(rows: Rows) -> torch.Tensor:
    """Reference: float32 [M, F]."""
    return rows.floats if rows.coded is None else rows.coded.decode()


def _check_same(gate: Rows, up: Rows) -> None:
    both = (gate.coded is None) == (up.coded is None)
    check(both, "one of gate and up is codes and the other floats; round both or none")


def _defines(operation: Gated | GatedGradient, *floats: torch.Tensor | None) -> dict[str, int]:
    """-D of its kernel, which has activations of the one dtype of `floats`."""
    found = [
        one for one in (operation.gate.floats, operation.up.floats, *floats) if one is not None
    ]
    defines = float_define(*found) if found else {"FLOAT": FLOATS[torch.float32]}
    return {
        "ACTIVATION": int(operation.activation),
        "CODED": int(operation.gate.coded is not None),
        **defines,
    }
