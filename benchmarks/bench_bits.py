"""Products of bit tensors by planes of bits and by bytes, beside int8 and float32.

25 pairs of widths are multiplied with few and with many rows. Then a graph's adjacency matrix
[N, N] of 1 bit is multiplied by features [N, D], as in QGTC's table: a batch of clusters, so that
most tiles are zeros. Rows are bit tensors already: "bytes" unpacks them, and "int8" has rows of
bytes. The right operand is packed before. "ratio" is the time of dense int8 over the side's,
"over_best" the time of the planned way over that of the better one.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import common
import torch
from torch import Tensor

from lsq.bits import BitTensor, planned, to_bits
from lsq.graphs import Adjacency
from lsq.native import loader, tiles
from lsq.ops.aggregate import Aggregate, Edges
from lsq.ops.bit_product import BitProduct, ByteProduct, UnpackBits
from lsq.ops.packed_weight import PackedWeight
from lsq.program.operation import Operation
from lsq.program.values import Coded, Rows
from lsq.quant import Format, Grain
from lsq.run.backends import backend

WIDTHS = (1, 2, 3, 4, 8)
ROWS, SIZE = (1, 8, 64), 2048
NODES, FEATURES, FEATURE_BITS = (1024, 2048, 4096), (16, 64), (2, 4, 8)
CLUSTER, DENSITY = 128, 0.05
"""Nodes of a cluster, and the share of edges that there are within one."""
PLANNED = ("planes", "bytes")


def prepared(*operations: Operation) -> Callable[[], None]:
    """The operations in one foreign call, without what Python takes to check them."""
    return backend("cpu").prepare([(one, ()) for one in operations])


@dataclass(frozen=True)
class Operands:
    """The operands of a product, and memory for its sums."""

    a: BitTensor
    b: BitTensor
    sums: Tensor

    @classmethod
    def of(cls, a: BitTensor, b: BitTensor) -> "Operands":
        return cls(a, b, torch.empty(a.shape[0], b.shape[1], dtype=torch.int32))

    def by_planes(self, *, all_tiles: bool = False) -> Callable[[], None]:
        operation: BitProduct = self.a._planes_product(self.b, sums=self.sums)
        operation.tiles = None if all_tiles else operation.tiles
        return prepared(operation)

    def by_bytes(self) -> Callable[[], None]:
        codes = torch.empty(self.a.shape, dtype=torch.int8)
        unpack = UnpackBits(matrix=self.a._matrix, codes=codes)
        product = ByteProduct(x=codes, weight=self.b._weight, sums=self.sums)
        return prepared(unpack, product)

    def by_int8(self) -> Callable[[], None]:
        """All codes are bytes, as in lsq's int8 layers."""
        weight = PackedWeight.of(self.b.codes().t().contiguous(), torch.ones(self.b.shape[1]))
        return prepared(ByteProduct(x=self.a.codes(), weight=weight, sums=self.sums))

    def by_edges(self, edges: Tensor) -> Callable[[], None]:
        """Sums over neighbours, as graph layers make them: floats, times 1."""
        targets, sources = edges.nonzero().t()
        graph = Adjacency.from_edges(torch.stack([sources, targets]), len(edges))
        codes = Coded(
            format=Format(name="features", bits=8, grain=Grain.TENSOR),
            codes=self.b.codes(),
            scale=torch.ones(1),
        )
        lists = Edges(indptr=graph.indptr, indices=graph.indices)
        return prepared(
            Aggregate(edges=lists, x=Rows(coded=codes), out=torch.empty(self.sums.shape))
        )

    def by_csr(self, edges: Tensor) -> Callable[[], object]:
        matrix, b = edges.float().to_sparse_csr(), self.b.to_val()
        return lambda: matrix @ b

    def by_float32(self) -> Callable[[], object]:
        a, b, out = self.a.to_val(), self.b.to_val(), torch.empty(self.sums.shape)
        return functools.partial(torch.mm, a, b, out=out)


def pairs(size: int, rows: tuple[int, ...]) -> Iterator[tuple[str, Operands, dict]]:
    right = {w: to_bits(torch.randn(size, size), w, along="columns") for w in WIDTHS}
    for count, (w, a) in itertools.product(rows, itertools.product(WIDTHS, WIDTHS)):
        one = Operands.of(to_bits(torch.randn(count, size), a), right[w])
        ways = {"planes": one.by_planes(), "bytes": one.by_bytes(), "int8": one.by_int8()}
        yield f"{count} x {size} x {size}", one, ways


def graphs(nodes: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[tuple[str, Operands, dict]]:
    for count, width, bits in itertools.product(nodes, widths, FEATURE_BITS):
        clusters = torch.arange(count) // CLUSTER
        edges = (torch.rand(count, count) < DENSITY) & (clusters[:, None] == clusters)
        features = to_bits(torch.randn(count, width), bits, along="columns")
        one = Operands.of(to_bits(edges, 1), features)
        ways = {
            "planes": one.by_planes(),
            "planes, all tiles": one.by_planes(all_tiles=True),
            "bytes": one.by_bytes(),
            "int8": one.by_int8(),
            "codes by edges": one.by_edges(edges),
            "torch float32": one.by_float32(),
            "torch CSR": one.by_csr(edges),
        }
        yield f"{count} x {count} x {width}", one, ways


def measured(cases: Iterator[tuple[str, Operands, dict]], options) -> Iterator[dict]:
    for shape, one, ways in cases:
        clock = common.clock_of(options)
        timings = common.alternate(ways, rounds=options.rounds, clock=clock)
        way = planned(one.a, one.b).way
        best = min(timings[name].fastest for name in PLANNED)
        for side, timing in timings.items():
            yield {
                "shape": shape,
                "left_bits": one.a.bits,
                "right_bits": one.b.bits,
                "nonzero_tiles": 1 - one.a.jumped / one.a.tile_count,
                "side": side,
                "planned": "planned" if side == way else "",
                "microseconds": 1e6 * timing.median,
                "fastest": 1e6 * timing.fastest,
                "ratio": timings["int8"].median / timing.median,
                "ratio_of_fastest": timings["int8"].fastest / timing.fastest,
                "over_best": timing.fastest / best if side == way else None,
            }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--instructions",
        choices=tiles.usable(),
        default=tiles.fastest(),
        help="the fastest ones by which bytes may be multiplied",
    )
    options = common.parse(parser, arguments)
    usable = tiles.usable()[tiles.usable().index(options.instructions) :]
    with mock.patch.object(tiles, "usable", lambda: usable):
        table = [
            *measured(pairs(128 if options.quick else SIZE, ROWS), options),
            *measured(graphs(*((256,), (16,)) if options.quick else (NODES, FEATURES)), options),
        ]
    planned_rows = [row for row in table if row["planned"]]
    conditions = common.conditions(
        options,
        baseline="int8",
        lsq_instructions=options.instructions,
        worst_choice=max(row["over_best"] for row in planned_rows),
        clock=common.clock_of(options).__name__,
        library=loader.description(),
    )
    common.report("bits", table, conditions, options)


if __name__ == "__main__":
    main()
