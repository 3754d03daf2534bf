"""Rows of words plus rows of positions, and their gradient: x = dropout(scale * weight[token] +
table[place]).

M tokens, V words, P positions, H hidden. Rows of the padding token are zeros and give no gradient.
"""

from __future__ import annotations

import torch

from lsq.native.geometry import (
    MANY_BLOCKS,
    THREADS,
    VECTOR,
    row_blocks,
    row_defines,
    rows_at_a_time,
)
from lsq.native.launch import Launch, check, float_define, launch
from lsq.ops.kernels import zero
from lsq.program.declare import Activations, Floats, In, Indices, Out, extent
from lsq.program.operation import Operation, Spec
from lsq.program.values import Dropout, dropped

WINDOW = 16
"""Occurrences of words that embedding.cu sums by themselves: its kWindow."""
SPLITS = 32
"""Parts in which the occurrences that stand before another are counted."""


class Embed(Operation):
    """x [M, H] of the tokens of a batch."""

    tokens: In[Indices]
    """[M]"""
    places: In[Indices]
    """[M], rows of the table of positions."""
    weight: In[Floats]
    """[V, H]"""
    table: In[Floats]
    """[P, H]"""
    scale: float
    padding: int
    """The token whose rows are zeros, without gradient."""
    dropout: In[Dropout] | None
    learned: bool
    """Whether the table of positions gets a gradient."""
    x: Out[Activations]
    """[M, H]"""

    rows = extent(0, "tokens")
    columns = extent(1, "weight")
    vocabulary = extent(0, "weight")
    positions = extent(0, "table")

    def limits(self):
        return {"tokens": self.vocabulary, "places": self.positions}

    def reference(self):
        x = self.weight[self.tokens] * self.scale + self.table[self.places]
        return (torch.where((self.tokens == self.padding)[:, None], 0.0, dropped(x, self.dropout)),)

    def cuda(self):
        return [
            launch(
                "embedding.cu",
                "lsq_embed",
                self,
                grid=row_blocks(self.rows, self.columns, most=MANY_BLOCKS),
                WINDOW=WINDOW,
                **float_define(self.x),
                **row_defines(self.columns),
            )
        ]

    def gradient(self, builder) -> None:
        builder.add(
            EmbedGradient(
                gradient=builder.gradient_of(self.x),
                tokens=self.tokens,
                places=self.places,
                dropout=self.dropout,
                scale=self.scale,
                padding=self.padding,
                dweight=builder.parameter_gradient(self.weight),
                dtable=builder.parameter_gradient(self.table) if self.learned else None,
            )
        )


class EmbedGradient(Operation):
    """The gradients of both tables; on the CPU, the occurrences of a word are added up in the order
    of rows."""

    gradient: In[Activations]
    """[M, H], of x."""
    tokens: In[Indices]
    """[M]"""
    places: In[Indices]
    """[M]"""
    dropout: In[Dropout] | None
    scale: float
    padding: int
    dweight: Out[Floats]
    """[V, H]"""
    dtable: Out[Floats] | None
    """[P, H]"""

    rows = extent(0, "tokens")
    columns = extent(1, "gradient")
    vocabulary = extent(0, "dweight")
    positions = extent(0, "dtable")

    def limits(self):
        places = {} if self.dtable is None else {"places": self.positions}
        return {"tokens": self.vocabulary, **places}

    def reference(self):
        gradient = dropped(self.gradient, self.dropout)
        kept = self.tokens != self.padding

        def scatter(indices, rows, factor):
            found = torch.zeros(rows, self.columns, dtype=torch.float32)
            return found.index_add_(0, indices[kept], gradient[kept] * factor)

        dtable = None if self.dtable is None else scatter(self.places, self.positions, 1.0)
        return scatter(self.tokens, self.vocabulary, self.scale), dtable

    def cuda_scratch(self):
        return scatter_scratch(self.rows, self.columns)

    def cuda(self, before, ordered, partial):
        tables = [out for out in (self.dweight, self.dtable) if out is not None]
        launches = scatter_launches(
            self, before, ordered, partial, tables=len(tables), **float_define(self.gradient)
        )
        return [*(zero(out) for out in tables), *launches]


def scatter_scratch(count: int, columns: int) -> list[Spec]:
    """What `scatter_launches` needs for `count` rows: how many stand before each occurrence, by
    parts; the sorted occurrences; sums of words cut by windows.
    """
    return [
        ((min(SPLITS, _blocks(count)), count), torch.int32),
        ((2, count), torch.int32),
        ((2 * -(-count // WINDOW), columns), torch.float32),
    ]


def scatter_launches(
    operation: Operation,
    before: torch.Tensor,
    ordered: torch.Tensor,
    partial: torch.Tensor,
    *,
    tables: int,
    **defines: int,
) -> list[Launch]:
    """Sums of rows by word, written to each of the operation's tables in turn.

    Args:
        operation: has rows and columns; embedding.cu says what it adds up.
        before, ordered, partial: as `scatter_scratch` says.
        defines: -D of the kernels.
    """
    count, columns = operation.rows, operation.columns
    check(
        count < 2**31,
        f"{count} tokens cannot run on CUDA: at most {2**31 - 1} are allowed; use smaller batches",
    )
    if not count:
        return []
    defines |= row_defines(columns) | {"WINDOW": WINDOW}
    windows = -(-partial.shape[0] // (2 * rows_at_a_time(columns)))
    strips = -(-columns // (VECTOR * defines["LANES"]))  # a block's share of the columns
    splits = before.shape[0]

    def kernel(name, *arguments, grid):
        return launch("embedding.cu", name, operation, *arguments, grid=grid, **defines)

    entries = []
    for table in range(tables):
        entries += [
            kernel("lsq_rank_occurrences", before, table, grid=(_blocks(count), splits)),
            kernel("lsq_sort_occurrences", before, ordered, splits, table, grid=_blocks(count)),
            kernel("lsq_sum_occurrences", ordered, partial, table, grid=(windows, strips)),
            kernel("lsq_join_occurrences", ordered, partial, table, grid=(windows, strips)),
        ]
    return entries


def _blocks(count: int) -> int:
    """Blocks with a thread for each of `count`."""
    return -(-count // THREADS)
