"""Batches of Cluster-GCN (Chiang et al. 2019, arXiv:1905.07953): some parts of a graph, and the
edges between their nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy
import torch

from lsq import extras
from lsq.graphs.adjacency import Adjacency
from lsq.graphs.metis import check_parts, partition
from lsq.graphs.packed import Features, PackedBatch
from lsq.graphs.widths import widths_of

if TYPE_CHECKING:
    from torch_geometric.data import Data

OWN = ("n_id", "adj_t", "edge_index")
"""What a batch has of its own, or not at all."""


class ClusterLoader:
    """Yields batches of a graph as data of PyTorch Geometric, which its layers and lsq's take.

    A batch has `adj_t`, a sparse CSR tensor of ones whose rows are targets, in place of
    `edge_index`; `n_id`, the original numbers of its nodes; and all tensors of nodes (x, y,
    train_mask). Its nodes stand part by part, and rise within a part. Each node is in one batch of
    an epoch.

    Attributes:
        epoch: number of the next epoch, from 0. An epoch's order depends on it and the seed alone,
            so setting it resumes a training.
    """

    def __init__(
        self,
        data: Data,
        parts: int = 1500,
        batch: int = 20,
        bits: int | Mapping[int, int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        file: str | os.PathLike | None = None,
        device: torch.device | str = "cpu",
    ):
        """Cut a graph.

        Args:
            data: a graph with `edge_index`, or with `adj_t` as a sparse CSR tensor.
            parts: number of parts that METIS cuts.
            batch: parts in a batch.
            bits: 2 to 8: features are rounded once, and sent packed in so many bits. A mapping from
                least degrees to bits, {0: 8, 16: 4}, chooses a width for each node. None: features
                are floats.
            shuffle: whether each epoch has another order of parts.
            seed: of METIS and of the order.
            file: where the cut is kept; see `partition`.
            device: where batches are unpacked.

        Raises:
            TypeError: the data is not of this kind.
            ValueError: the data has values of edges, no edges or no features to round, or an
                argument is not allowed.
            MissingPackage: PyTorch Geometric or pymetis is not installed.
        """
        extras.require("ClusterLoader", "graphs")
        from torch_geometric.data import Data

        if not isinstance(data, Data):
            raise TypeError(f"data is a {type(data).__name__}; give a torch_geometric.data.Data")
        self.adjacency = _adjacency(data)
        check_parts(self.adjacency, parts)
        if not isinstance(batch, int) or not 1 <= batch <= parts:
            raise ValueError(
                f"batch is {batch!r}; it must be a whole number from 1 to the number of parts,"
                f" {parts}"
            )
        self._tensors = _node_tensors(data)
        self._others = {
            name: data[name] for name in data.keys() if name not in (*OWN, *self._tensors)
        }
        self._features = None
        if bits is not None:
            degrees, x = self.adjacency.degrees, self._tensors.pop("x", None)
            self._features = Features.of(_floats(x), degrees, widths_of(bits))
        part = partition(self.adjacency, parts, seed, file)
        counts = part.bincount(minlength=parts)
        self._parts = torch.argsort(part, stable=True).split(counts[counts > 0].tolist())
        self.batch, self.shuffle, self.seed, self.device = batch, shuffle, seed, device
        self.epoch = 0

    def __len__(self) -> int:
        """Batches in an epoch. Empty parts are left out."""
        return -(-len(self._parts) // self.batch)

    def __iter__(self) -> Iterator[Data]:
        for packed in self.packed():
            yield packed.to(self.device).unpack()

    def packed(self) -> Iterator[PackedBatch]:
        """Yield the batches of the next epoch as they are sent to the device."""
        order = range(len(self._parts))
        if self.shuffle:
            order = numpy.random.default_rng([self.seed, self.epoch]).permutation(order)
        self.epoch += 1
        pinned = torch.device(self.device).type == "cuda"
        for first in range(0, len(order), self.batch):
            nodes = torch.cat([self._parts[i] for i in order[first : first + self.batch]])
            graph = (self.adjacency, nodes, self._features, self._tensors, self._others)
            yield PackedBatch.of(*graph, pinned)


def _adjacency(data: Data) -> Adjacency:
    """Return the edges of a graph. Raises ValueError: it has none, or they have values."""
    valued = [name for name in data.keys() if name not in OWN and data.is_edge_attr(name)]
    adj_t = data.get("adj_t")
    if getattr(adj_t, "layout", None) != torch.sparse_csr:
        adj_t = None
    if valued or adj_t is not None and (adj_t.values() != 1).any():
        raise ValueError(
            f"the data has {', '.join(valued or ['adj_t'])} with values of edges, but sums over"
            " neighbours are unweighted: remove them if they may be ignored"
        )
    if data.get("edge_index") is not None:
        return Adjacency.from_edges(data.edge_index.cpu(), data.num_nodes)
    if adj_t is None:
        raise ValueError(
            "the data has no edges that can be read; give edge_index [2, edges], or adj_t as a"
            " sparse CSR tensor of PyTorch"
        )
    return Adjacency.from_csr(adj_t.crow_indices().cpu(), adj_t.col_indices().cpu())


def _node_tensors(data: Data) -> dict[str, torch.Tensor]:
    """Return what has a row for each node. Raises ValueError: it is no plain tensor, or its name is
    that of a batch's own numbers of nodes."""
    found = {}
    for name in data.keys():
        if name in OWN[1:] or not data.is_node_attr(name):
            continue
        value = data[name]
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not dense or data.__cat_dim__(name, value) % value.dim() or name in OWN:
            raise ValueError(
                f"{name} has an entry for each node and cannot be sliced: make it a dense tensor"
                f" with a row for each node, under another name than {OWN[0]}, or remove it"
            )
        found[name] = value.detach().cpu()
    return found


def _floats(x: torch.Tensor | None) -> torch.Tensor:
    if x is None or x.dim() != 2 or not x.is_floating_point():
        given = "none" if x is None else f"{x.dtype} {list(x.shape)}"
        raise ValueError(
            f"bits need features, data.x, as floats [nodes, columns], but there are {given}; leave"
            " bits out"
        )
    return x
