"""Edges of a graph, sorted by the node that they lead to: a sparse matrix of ones by rows (CSR)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lsq.native import loader

MOST = 2**31 - 1
"""Nodes and edges are counted in 32 bits."""


@dataclass(frozen=True, eq=False)
class Adjacency:
    """The matrix A [N, N] of a directed graph: A[target, source] is how many edges lead from
    `source` to `target`. A @ x [N, D] is the sum over neighbours, as PyTorch Geometric propagates.

    Repeated edges count as often as they are given, and an edge may lead to its own node.
    """

    indptr: torch.Tensor  # int32 [N + 1], where the sources of each target begin.
    indices: torch.Tensor  # int32 [E], the sources of each target, in the given order.

    @classmethod
    def from_edges(cls, edges: torch.Tensor, nodes: int | None = None) -> Adjacency:
        """Sort edges [2, E], sources above targets: PyTorch Geometric's `edge_index`.

        Args:
            nodes: N; None: the largest index plus one.

        Raises:
            ValueError: edges are not whole numbers [2, E], or an index is negative or not below N.
        """
        if edges.dim() != 2 or len(edges) != 2 or not _whole(edges):
            raise ValueError(
                f"edges are {edges.dtype} {list(edges.shape)}; give whole numbers [2, edges], the"
                " sources in the first row and the targets in the second"
            )
        if hasattr(edges, "as_tensor"):  # EdgeIndex of PyTorch Geometric, which has no memory
            edges = edges.as_tensor()
        if nodes is None:
            nodes = int(edges.max()) + 1 if edges.numel() else 0
        _check_count("nodes", nodes)
        _check_count("edges", edges.shape[1])
        if edges.is_cpu and loader.available():
            return cls._sorted(edges.contiguous(), nodes)
        _check_indices(edges, nodes)
        sources, targets = edges
        order = torch.argsort(targets, stable=True)
        ends = torch.bincount(targets, minlength=nodes).cumsum(0)
        return cls(indptr=torch.cat([ends.new_zeros(1), ends]).int(), indices=sources[order].int())

    @classmethod
    def _sorted(cls, edges: torch.Tensor, nodes: int) -> Adjacency:
        """Sort edges by the C++ library."""
        count = edges.shape[1]
        sizes = nodes + 1, count
        indptr, indices = (edges.new_empty(size, dtype=torch.int32) for size in sizes)
        outside = edges.new_empty(1, dtype=torch.int64)
        wide = edges.dtype == torch.int64
        loader.call("lsq_sort_edges", edges, wide, count, nodes, indptr, indices, outside)
        if outside >= 0:
            _refuse(edges, int(outside), nodes)
        return cls(indptr=indptr, indices=indices)

    @classmethod
    def from_csr(cls, indptr: torch.Tensor, indices: torch.Tensor) -> Adjacency:
        """Take the matrix by its rows: indptr [N + 1] and indices [E], as `crow_indices()` and
        `col_indices()` of a sparse tensor of PyTorch. Its values are ignored.

        Raises:
            ValueError: indptr does not rise from 0 to E, or an index is negative or not below N.
        """
        for name, given in (("indptr", indptr), ("indices", indices)):
            if given.dim() != 1 or not _whole(given):
                raise ValueError(
                    f"{name} is {given.dtype} {list(given.shape)}; give whole numbers in one"
                    " dimension"
                )
        if not len(indptr):
            raise ValueError("indptr is empty; a graph without nodes has [0]")
        if indptr[0] != 0 or indptr[-1] != len(indices):
            raise ValueError(
                f"indptr begins with {int(indptr[0])} and ends with {int(indptr[-1])}; it must"
                f" begin with 0 and end with the number of edges, {len(indices)}"
            )
        _check_count("nodes", len(indptr) - 1)
        _check_count("edges", len(indices))
        falls = (indptr.diff() < 0).nonzero()
        if len(falls):
            row = int(falls[0])
            raise ValueError(
                f"indptr falls from {int(indptr[row])} to {int(indptr[row + 1])} at node {row}; it"
                " must not fall"
            )
        _check_indices(indices[None], len(indptr) - 1)
        return cls(indptr=indptr.int(), indices=indices.int())

    @property
    def nodes(self) -> int:
        """N."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """E."""
        return len(self.indices)

    @cached_property
    def degrees(self) -> torch.Tensor:
        """The number of edges that lead to each node, int32 [N]."""
        return self.indptr.diff()

    @cached_property
    def transposed(self) -> Adjacency:
        """The graph with all edges reversed, for the gradient of sums over neighbours."""
        found = Adjacency.from_edges(torch.stack([self.targets, self.indices]), self.nodes)
        found.__dict__["transposed"] = self
        return found

    @cached_property
    def filled(self) -> Adjacency:
        """The graph with nodes without edges, and places behind `indices`, up to sizes that many
        graphs share: 16 sizes between two powers of two."""
        begins = self.indptr.new_full((_filled(self.nodes) + 1,), self.edges)
        begins[: self.nodes + 1] = self.indptr
        indices = self.indices.new_zeros(_filled(self.edges))
        indices[: self.edges] = self.indices
        return Adjacency(indptr=begins, indices=indices)

    def subgraph(self, nodes: torch.Tensor) -> Adjacency:
        """Return the edges between given nodes, which are numbered anew in the given order.

        Args:
            nodes: whole numbers [n], none of them twice.

        Raises:
            ValueError: nodes are not whole numbers in one dimension, one is not in the graph, or
                one is given twice.
        """
        if nodes.dim() != 1 or not _whole(nodes):
            raise ValueError(
                f"nodes are {nodes.dtype} {list(nodes.shape)}; give whole numbers in one dimension"
            )
        outside = ((nodes < 0) | (nodes >= self.nodes)).nonzero()
        if len(outside):
            raise ValueError(
                f"node {int(nodes[outside[0]])} is not in the graph, whose nodes are 0 to"
                f" {self.nodes - 1}"
            )
        nodes, count = nodes.long().contiguous(), len(nodes)
        order = torch.arange(count, dtype=torch.int32, device=nodes.device)
        positions = self.indices.new_full((self.nodes,), -1)
        positions[nodes] = order
        twice = (positions[nodes] != order).nonzero()
        if len(twice):
            raise ValueError(f"node {int(nodes[twice[0]])} is given twice; give each node once")
        degrees = self.degrees[nodes]
        most = int(degrees.sum())
        if self.indices.is_cpu and loader.available():
            begins, kept = self.indptr.new_empty(count + 1), self.indices.new_empty(most)
            arguments = (self.indptr, self.indices, nodes, count, positions, begins, kept)
            loader.call("lsq_subgraph", *arguments)
            return Adjacency(indptr=begins, indices=kept[: int(begins[-1])].clone())
        rows = order.repeat_interleave(degrees, output_size=most)
        first = self.indptr[nodes] - (degrees.cumsum(0) - degrees)
        edges = first[rows] + torch.arange(most, device=nodes.device)
        sources = positions[self.indices[edges]]
        inside = sources >= 0
        ends = torch.bincount(rows[inside], minlength=count).cumsum(0)
        return Adjacency(indptr=torch.cat([ends.new_zeros(1), ends]).int(), indices=sources[inside])

    @property
    def targets(self) -> torch.Tensor:
        """The target of each edge, int32 [E]."""
        nodes = torch.arange(self.nodes, dtype=torch.int32, device=self.indptr.device)
        return nodes.repeat_interleave(self.degrees, output_size=self.edges)

    def to(self, device: torch.device | str) -> Adjacency:
        """Return the same graph on a device; the graph itself if it is there."""
        indptr = self.indptr.to(device)
        if indptr is self.indptr:
            return self
        return Adjacency(indptr=indptr, indices=self.indices.to(device))

    def to_torch(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return A as a sparse CSR tensor of PyTorch, which layers of PyTorch Geometric take in
        place of `edge_index`."""
        ones = torch.ones(self.edges, dtype=dtype, device=self.indices.device)
        return torch.sparse_csr_tensor(
            self.indptr,
            self.indices,
            ones,
            size=(self.nodes, self.nodes),
            device=ones.device,
            check_invariants=False,
        )


def _whole(given: torch.Tensor) -> bool:
    return given.dtype in (torch.int32, torch.int64)


def _filled(count: int) -> int:
    step = max(16, 2 ** (max(count - 1, 1).bit_length() - 5))
    return -(-count // step) * step


def _check_count(name: str, count: int) -> None:
    if not 0 <= count <= MOST:
        raise ValueError(f"the graph has {count:,} {name}; it may have 0 to {MOST:,}")


def _check_indices(edges: torch.Tensor, nodes: int) -> None:
    """Raise ValueError, naming the first edge with an index outside of [0, nodes)."""
    outside = ((edges < 0) | (edges >= nodes)).any(dim=0).nonzero()
    if len(outside):
        _refuse(edges, int(outside[0]), nodes)


def _refuse(edges: torch.Tensor, edge: int, nodes: int) -> None:
    raise ValueError(
        f"edge {edge} has the nodes {edges[:, edge].tolist()}, but the graph has {nodes} nodes:"
        f" indices must be at least 0 and below {nodes}"
    )
