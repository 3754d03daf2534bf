"""Batches as one block of bytes: edges in 16 bits, features in as many bits as they were given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from lsq import extras
from lsq.graphs.adjacency import Adjacency
from lsq.graphs.widths import groups_of
from lsq.quant import calibrate, maximum_code, quantize
from lsq.quant.tables import integer

if TYPE_CHECKING:
    from torch_geometric.data import Data

SHORT = 2**16
"""Batches with at most so many nodes have indices of 16 bits."""
ALIGNMENT = 16
"""Bytes; each tensor in a block begins at a multiple."""
CHUNK = 2**14
"""Rows that are rounded and packed at a time, to save memory."""


class Stored(NamedTuple):
    """How a tensor lies in a block."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Coding:
    """What packed features are worth: codes * multiplier of their group * scale."""

    columns: int
    bits: tuple[int, ...]  # of each group of nodes
    multipliers: tuple[int, ...]
    scale: float

    def pack(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """Pack int8 codes [n, columns] into uint8 [n, bytes]; a row fills whole bytes."""
        bits = self.bits[group]
        count, stored = integer(bits).word
        words = -(-self.columns // count)
        padded = torch.nn.functional.pad(codes, (0, words * count - self.columns))
        unsigned = padded.view(torch.uint8) & 2**bits - 1
        return integer(bits).pack(unsigned).view(len(codes), words * stored)

    def unpack(self, group: int, packed: torch.Tensor) -> torch.Tensor:
        """Return the float32 features [n, columns] of packed rows."""
        bits = self.bits[group]
        count, stored = integer(bits).word
        shape = (len(packed), packed.shape[1] // stored * count)
        unsigned = integer(bits).unpack(packed.flatten(), shape)[:, : self.columns]
        codes = (unsigned << 8 - bits).view(torch.int8) >> 8 - bits  # the sign, too
        return (codes * self.multipliers[group]).float() * self.scale


@dataclass(frozen=True)
class Features:
    """The features of all nodes, rounded once and packed. Nodes of a group share a width."""

    coding: Coding
    tables: list[torch.Tensor]  # uint8 [nodes of the group, bytes of a row]
    groups: torch.Tensor  # uint8 [N]
    rows: torch.Tensor  # int32 [N], the node's row in the table of its group

    @classmethod
    def of(cls, x: torch.Tensor, degrees: torch.Tensor, bits: Mapping[int, int]) -> Features:
        """Round features [N, columns] under the clip of least squared error of the widest group.

        All groups share its scale: codes of fewer bits count by a whole multiple of it.

        Args:
            bits: least degree of a group -> bits.
        """
        least, widths = zip(*sorted(bits.items()), strict=True)
        largest = maximum_code(max(widths))
        clip = calibrate(x, "mse", max(widths))
        coding = Coding(
            columns=x.shape[1],
            bits=widths,
            multipliers=tuple(largest // maximum_code(width) for width in widths),
            scale=(clip / largest).item(),
        )
        groups = groups_of(degrees, least)
        rows, tables = groups.new_empty(len(x), dtype=torch.int32), []
        for group, (width, multiplier) in enumerate(zip(widths, coding.multipliers, strict=True)):
            nodes = (groups == group).nonzero().flatten()
            rows[nodes] = torch.arange(len(nodes), dtype=torch.int32, device=rows.device)
            own = clip * (multiplier * maximum_code(width) / largest)
            chunks = [quantize(x[some], own, width).codes for some in nodes.split(CHUNK)]
            tables.append(torch.cat([coding.pack(group, codes) for codes in chunks]))
        return cls(coding=coding, tables=tables, groups=groups.to(torch.uint8), rows=rows)

    def chosen(self, nodes: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (table, rows of it) for some nodes: their groups if there are several, then each
        group's packed rows."""
        rows = self.rows[nodes]
        if len(self.tables) == 1:
            yield self.tables[0], rows
            return
        yield self.groups, nodes
        groups = self.groups[nodes]
        for group, table in enumerate(self.tables):
            yield table, rows[groups == group]


@dataclass(frozen=True)
class PackedBatch:
    """A batch of nodes and the edges between them, in one uint8 tensor that one copy sends.

    In it lie, one after another: indptr (int32), indices (uint16 up to SHORT nodes, else int32),
    the original numbers of nodes (int32), packed features, and other tensors of nodes.
    """

    buffer: torch.Tensor
    stored: list[Stored]
    coding: Coding | None  # None: features are among the other tensors.
    names: list[str]  # of the other tensors
    others: Mapping[str, object]  # what belongs to the whole graph

    @classmethod
    def of(
        cls,
        adjacency: Adjacency,
        nodes: torch.Tensor,
        features: Features | None,
        tensors: Mapping[str, torch.Tensor],
        others: Mapping[str, object],
        pinned: bool = False,
    ) -> PackedBatch:
        """Pack the subgraph of some nodes.

        Args:
            nodes: int64 [n].
            features: None: they are among `tensors`, if there are any.
            tensors: those with a row for each node of the graph.
            pinned: whether the block lies in pinned memory, for a copy to a GPU.
        """
        chosen = adjacency.subgraph(nodes)
        short = torch.uint16 if len(nodes) <= SHORT else torch.int32
        copied = [(chosen.indptr, torch.int32), (chosen.indices, short), (nodes, torch.int32)]
        gathered = [*features.chosen(nodes)] if features else []
        gathered += [(tensor, nodes) for tensor in tensors.values()]
        stored = [Stored(dtype, tuple(tensor.shape)) for tensor, dtype in copied]
        stored += [Stored(one.dtype, (len(rows), *one.shape[1:])) for one, rows in gathered]
        size = sum(map(_padded, stored))
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        views = _views(buffer, stored)
        for (tensor, _), view in zip(copied, views, strict=False):
            view.copy_(tensor)
        for (tensor, rows), view in zip(gathered, views[len(copied) :], strict=True):
            torch.index_select(tensor, 0, rows, out=view)
        coding = features.coding if features else None
        return cls(buffer, stored, coding, [*tensors], others)

    @property
    def nbytes(self) -> int:
        """Bytes that a copy to a device moves."""
        return self.buffer.numel()

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the batch on a device, by one copy."""
        return replace(self, buffer=self.buffer.to(device, non_blocking=True))

    def unpack(self) -> Data:
        """Return the batch as data of PyTorch Geometric, on the device that it is on.

        It has `n_id` (the original numbers of its nodes), `adj_t` (a sparse CSR tensor of ones,
        rows are targets) in place of `edge_index`, and the tensors of its nodes, which share the
        block's memory.
        """
        extras.require("PackedBatch", "graphs")
        from torch_geometric.data import Data

        indptr, indices, nodes, *rest = _views(self.buffer, self.stored)
        adjacency = Adjacency(indptr=indptr, indices=indices.int())
        first = len(rest) - len(self.names)
        whole = {
            name: value.to(indptr.device) if isinstance(value, torch.Tensor) else value
            for name, value in self.others.items()
        }
        batch = Data(**whole, **dict(zip(self.names, rest[first:], strict=True)))
        if self.coding:
            batch.x = _features(self.coding, rest[:first])
        batch.n_id, batch.adj_t = nodes.long(), adjacency.to_torch()
        if "num_nodes" in self.others:
            batch.num_nodes = len(nodes)
        return batch


def _features(coding: Coding, packed: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(packed) == 1:
        return coding.unpack(0, packed[0])
    groups, *tables = packed
    x = groups.new_empty((len(groups), coding.columns), dtype=torch.float32)
    for group, table in enumerate(tables):
        x[groups == group] = coding.unpack(group, table)
    return x


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


def _padded(stored: Stored) -> int:
    return -(-_bytes(stored) // ALIGNMENT) * ALIGNMENT


def _views(buffer: torch.Tensor, stored: Sequence[Stored]) -> list[torch.Tensor]:
    """Return the tensors in a block, which share its memory."""
    parts = buffer.split([_padded(one) for one in stored])
    return [
        part[: _bytes(one)].view(one.dtype).view(one.shape)
        for part, one in zip(parts, stored, strict=True)
    ]
