"""Embedding, and its gradient: x = dropout(scale * weight[token] + table[position]).

M tokens, V words, P positions, H hidden. The padding token's rows are zeros and have no gradient.
"""

from __future__ import annotations

import torch

from lsq.program.declare import Activations, Floats, In, Indices, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Dropout, dropped


class Embed(Operation):
    """The embeddings x [M, H] of the tokens of a batch."""

    tokens: In[Indices]  # [M]
    positions: In[Indices]  # [M], rows of `table`.
    weight: In[Floats]  # [V, H]
    table: In[Floats]  # [P, H]
    scale: float
    padding: int  # The padding token.
    dropout: In[Dropout] | None
    learned: bool  # Whether `table` gets a gradient.
    x: Out[Activations]  # [M, H]

    rows = extent(0, "tokens")
    columns = extent(1, "weight")
    vocabulary = extent(0, "weight")
    table_rows = extent(0, "table")

    def limits(self):
        return {"tokens": self.vocabulary, "positions": self.table_rows}

    def reference(self):
        x = self.weight[self.tokens] * self.scale + self.table[self.positions]
        padding = (self.tokens == self.padding)[:, None]
        return {"x": torch.where(padding, 0.0, dropped(x, self.dropout))}

    def gradient(self, builder) -> None:
        builder.add(
            EmbedGradient(
                gradient=builder.gradient_of(self.x),
                tokens=self.tokens,
                positions=self.positions,
                dropout=self.dropout,
                scale=self.scale,
                padding=self.padding,
                dweight=builder.parameter_gradient(self.weight),
                dtable=builder.parameter_gradient(self.table) if self.learned else None,
            )
        )


class EmbedGradient(Operation):
    """The gradients of both tables; the CPU adds up occurrences of a word in order of rows."""

    gradient: In[Activations]  # [M, H], of x.
    tokens: In[Indices]  # [M]
    positions: In[Indices]  # [M]
    dropout: In[Dropout] | None
    scale: float
    padding: int
    dweight: Out[Floats]  # [V, H]
    dtable: Out[Floats] | None  # [P, H]

    rows = extent(0, "tokens")
    columns = extent(1, "gradient")
    vocabulary = extent(0, "dweight")
    table_rows = extent(0, "dtable")

    def limits(self):
        positions = {} if self.dtable is None else {"positions": self.table_rows}
        return {"tokens": self.vocabulary, **positions}

    def reference(self):
        gradient = dropped(self.gradient, self.dropout)
        kept = self.tokens != self.padding

        def scatter(indices, rows, factor):
            found = torch.zeros(rows, self.columns, dtype=torch.float32)
            return found.index_add_(0, indices[kept], gradient[kept] * factor)

        dtable = None if self.dtable is None else scatter(self.positions, self.table_rows, 1.0)
        return {"dweight": scatter(self.tokens, self.vocabulary, self.scale), "dtable": dtable}
