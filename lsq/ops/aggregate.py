"""Sums over the neighbours of each node of a graph, with the epilogue of a graph layer.

    z[i] = factor[i] * (sum over edges j -> i of x[j] + own * x[i]) + root[i] + bias
    result[i] = dropout(activation(z[i])), as floats or rounded once to codes

Sums of codes are exact int32 sums. So the adjacency matrix has no weights: GCN's factors
1 / sqrt(degree) (Kipf and Welling 2017, equation 2) are the `row_factor` of the product that makes
x and the `factor` of its sums, and the mean over neighbours is a `factor`. M nodes, E edges, H
columns.
"""

from __future__ import annotations

import torch

from lsq.native.launch import check
from lsq.ops.nonlinearity import Nonlinearity, epilogue
from lsq.ops.sums import PartialSums
from lsq.program.declare import Activations, Floats, In, Integers, Offsets, Out, Value, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Rows


class Edges(Value):
    """The edges of a graph by the node that they lead to (lsq.graphs.Adjacency)."""

    indptr: In[Offsets]  # [M + 1], where the edges of each node begin.
    indices: In[Integers]  # [E or more], where each edge comes from.

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Reference: the sums [M, H] of the neighbours' rows of x [M, H]."""
        degrees = self.indptr.diff().long()
        targets = torch.arange(len(degrees), device=x.device).repeat_interleave(degrees)
        sources = self.indices[: len(targets)].long()
        return torch.zeros_like(x).index_add_(0, targets, x[sources])


def limits(nodes: int, **edges: Edges | None) -> dict[str, int]:
    """See Operation.limits."""
    found = {}
    for name, one in edges.items():
        if one is not None:
            found |= {f"{name}.indptr": one.indices.shape[0], f"{name}.indices": nodes}
    return found


class Aggregate(Operation):
    """The sums over neighbours of x [M, H], and the epilogue of a graph layer."""

    edges: In[Edges]
    reversed_edges: In[Edges] | None  # For the gradient: by the node that each edge leaves.
    x: In[Rows]  # [M, H]; codes have one scale.
    own: In[Floats] | None  # [1], how often a node is its own neighbour; it has no gradient.
    factor: In[Floats] | None  # [M]
    root: In[Activations] | None  # [M, H]
    bias: In[Floats] | None  # [H]
    nonlinearity: Out[Nonlinearity] | None
    out: Out[Activations] | None  # [M, H]
    rounded: Out[Coded] | None  # [M, H]

    rows = extent(0, "x.tensor")
    columns = extent(1, "x.tensor")

    def __post_init__(self):
        check(
            self.x.coded is None or not self.x.coded.by_row,
            "codes with a scale for each row cannot be summed over rows; round them under one clip",
        )

    def limits(self):
        return limits(self.rows, edges=self.edges, reversed_edges=self.reversed_edges)

    def reference(self):
        codes = self.x.coded is not None
        x = self.x.tensor.int() if codes else self.x.floats
        z = self.edges.sum(x).float()
        z = z if self.own is None else z + self.own * self.x.tensor
        scale = self.x.scale if codes else 1.0
        z = z * (scale if self.factor is None else scale * self.factor[:, None])
        z = z if self.root is None else z + self.root
        z = z if self.bias is None else z + self.bias
        return epilogue(z, self.nonlinearity, self.rounded)

    def gradient(self, builder) -> None:
        upstream = builder.gradient_of(self.out if self.rounded is None else self.rounded.codes)
        if upstream is None:
            return
        source = self.x.tensor
        producer = builder.producer(source)
        check(
            getattr(producer, "nonlinearity", None) is None,
            f"{source.name} is summed over neighbours after an activation or dropout, which its"
            " gradient would not undo: put these behind the sums",
        )
        if self.root is not None:
            builder.accumulate(self.root, upstream)
        total = builder.parameter_gradient(self.bias)
        dx = rounded = dclip = None
        if builder.needs_gradient(source):
            dx, rounded = builder.product_gradient(source)
            dclip = builder.parameter_gradient(self.x.clip)
        if dx is None and rounded is None and total is None:
            return
        builder.add(
            AggregateGradient(
                gradient=upstream,
                edges=self.reversed_edges if builder.needs_gradient(source) else None,
                own=self.own,
                factor=self.factor,
                row_factor=getattr(producer, "row_factor", None),
                x=self.x.coded,
                dx=dx,
                rounded=rounded,
                sum=total,
                dclip=dclip,
            )
        )


class AggregateGradient(Operation):
    """The gradient of the rows [M, H] that an Aggregate sums, before their rounding and row_factor.

    dx[j] = row_factor[j] * (1 where x[j] is not clipped) * sum over edges j -> i of g[i]
    g[i] = factor[i] * gradient[i]

    `gradient` has its activation and dropout undone by the operation that made it.
    """

    gradient: In[Activations]  # [M, H]
    edges: In[Edges] | None  # Reversed: by the node that each edge leaves.
    own: In[Floats] | None  # [1]
    factor: In[Floats] | None  # [M]
    row_factor: In[Floats] | None  # [M]
    x: In[Coded] | None  # [M, H]; None in float mode.
    dx: Out[Activations] | None  # [M, H]
    rounded: Out[RoundedGradient] | None  # [M, H], in place of dx.
    sum: Out[Floats] | None  # [H], of gradient over rows: the gradient of the bias.
    dclip: Out[Floats] | None  # [1], gradient of x's clip.
    parts: Out[Floats] | None  # Parts of `sum` and `dclip`, in place of these; see lsq.ops.sums.

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    def limits(self):
        return limits(self.rows, edges=self.edges)

    def reference(self):
        g = self.gradient.float()
        total = g.sum(dim=0)
        dx, dclip = None, torch.zeros(1, dtype=torch.float32)
        if self.edges is not None:
            g = g if self.factor is None else g * self.factor[:, None]
            dx = self.edges.sum(g)
            dx = dx if self.own is None else dx + self.own * g
            dx, dclip = (dx, dclip) if self.x is None else self.x.straight_through(dx)
            dx = dx if self.row_factor is None else dx * self.row_factor[:, None]
        return {
            "dx": dx,
            "rounded": self.rounded and self.rounded.encode(dx),
            "sum": total,
            "dclip": dclip,
            "parts": PartialSums.of(self.parts, self.columns, (total,), dclip, self.x).as_parts(),
        }
