"""Graph networks on batches of Cluster-GCN, beside PyTorch Geometric in float32.

A batch is 20 of the 1,500 parts into which METIS cuts a drawn graph of a published size. "sums" are
those over neighbours, of int8 codes by lsq as its programs run them; "inference" is a pass of a
model of three layers, "training" a step with its Adam, "bytes" is what a batch sends to a device.

The baseline is PyTorch's sparse CSR product, whose matrix has GCN's factors already; "edges" are
PyTorch Geometric's default, by edge_index. lsq remembers a graph by its tensor: "lsq, new graph"
gets another tensor each time, as the batches of an epoch are. One thread is timed by the seconds
that the processor gave it, several by the wall's clock.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import common
import scipy.sparse
import torch
from drawn_graphs import QUICK, SIZES, Size, draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GIN, SimpleConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import lsq
from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.graphs import Adjacency, ClusterLoader
from lsq.native import loader
from lsq.ops.aggregate import Aggregate, Edges
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.optim import Adam
from lsq.program.values import Coded, Rows
from lsq.quant.formats import Format, Grain
from lsq.run.backends import backend

PARTS = 20
LAYERS = 3
MOST_DENSE = 4096
"""Nodes up to which a dense matrix is multiplied, too."""
CODES = Format(name="activation", bits=8, grain=Grain.TENSOR)
BITS = (8, 4, 2)
CSR, EDGES = "PyG, torch CSR", "PyG, edges"

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of a graph."""

    name: str
    size: Size
    batch: Data
    full: Data
    """The whole graph."""

    @property
    def adjacency(self) -> Adjacency:
        csr: Tensor = self.batch.adj_t
        return Adjacency(indptr=csr.crow_indices(), indices=csr.col_indices())

    @property
    def edge_index(self) -> Tensor:
        adjacency = self.adjacency
        return torch.stack([adjacency.indices, adjacency.targets]).long()

    def described(self, table: str, model: str = "") -> dict:
        return {
            "table": table,
            "graph": self.name,
            "nodes": self.batch.num_nodes,
            "edges": self.adjacency.edges,
            "model": model,
        }


def cases(names: list[str], quick: bool) -> Iterator[Case]:
    for name in names:
        size = QUICK if quick else SIZES[name]
        full = draw(size)
        clusters = ClusterLoader(full, parts=size.parts, batch=PARTS)
        yield Case(name=name, size=size, batch=next(iter(clusters)), full=full)


def sums_of(case: Case) -> dict[str, Run]:
    """Ways to sum over neighbours. lsq's columns and nodes are padded as in its programs."""
    x, csr, edge_index = case.batch.x, case.batch.adj_t, case.edge_index
    nodes, columns = x.shape
    matrix = scipy.sparse.csr_matrix(
        (csr.values().numpy(), csr.col_indices().numpy(), csr.crow_indices().numpy()),
        (nodes, nodes),
    )
    values, propagate = x.numpy(), SimpleConv(aggr="sum")
    sides: dict[str, Run] = {
        "torch CSR": lambda: csr @ x,
        EDGES: lambda: propagate(x, edge_index),
        CSR: lambda: propagate(x, csr),
        "scipy CSR": lambda: matrix @ values,
        "lsq": aggregated(case, rounds=False),
        "lsq, relu to codes": aggregated(case, rounds=True),
    }
    if nodes <= MOST_DENSE:
        dense, wide = csr.to_dense().char(), -columns % 8
        codes = pad(codes_of(x), (0, wide, 0, -nodes % 8))
        dense = pad(dense, (0, -nodes % 8, 0, -nodes % 8))
        sides["torch dense int8"] = lambda: torch._int_mm(dense, codes)
    return sides


def codes_of(x: Tensor) -> Tensor:
    return (x * (127 / x.abs().max())).round().char()


def aggregated(case: Case, *, rounds: bool) -> Run:
    """The sums of codes; `rounds`: with all that may follow in a GCN, to codes again."""
    filled = case.adjacency.filled
    x, nodes = case.batch.x, filled.nodes
    rows, columns = x.shape
    codes = pad(codes_of(x), (0, -columns % DIMENSION_MULTIPLE, 0, nodes - rows))
    ends = {}
    if rounds:
        ends = {
            "own": torch.ones(1),
            "factor": torch.rand(nodes),
            "bias": torch.randn(codes.shape[1]),
            "nonlinearity": Nonlinearity(activation=Activation.relu),
        }
    operation = Aggregate(
        edges=Edges(indptr=filled.indptr, indices=filled.indices),
        x=Rows(coded=Coded(format=CODES, codes=codes, scale=torch.ones(1))),
        out=None if rounds else torch.empty(codes.shape),
        rounded=Coded(
            format=CODES, codes=torch.empty_like(codes), scale=torch.ones(1), clip=torch.ones(1)
        )
        if rounds
        else None,
        **ends,
    )
    return backend("cpu").prepare([(operation, [])])


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of PyTorch Geometric."""

    kind: type[nn.Module]
    hidden: int

    def made(self, case: Case, **options) -> nn.Module:
        size = case.size
        torch.manual_seed(1)
        return self.kind(size.features, self.hidden, LAYERS, size.classes, **options)


MODELS = {
    "GCN, 16 wide": Model(kind=GCN, hidden=16),
    "GCN, 128 wide": Model(kind=GCN, hidden=128),
    "GIN, 64 wide": Model(kind=GIN, hidden=64),
}
QUICK_MODELS = ("GCN, 16 wide", "GIN, 64 wide")


def new(csr: Tensor) -> Tensor:
    """The same sparse matrix as another tensor, whose parts share its memory."""
    return torch.sparse_csr_tensor(
        csr.crow_indices(), csr.col_indices(), csr.values(), csr.shape, check_invariants=False
    )


def passes_of(model: Model, case: Case, training: bool) -> dict[str, Run]:
    """Passes of a model in eval mode, or steps of its training."""
    x, y, csr, edge_index = case.batch.x, case.batch.y, case.batch.adj_t, case.edge_index
    matrix, options = csr, {}
    if model.kind is GCN:
        options = {"normalize": False, "add_self_loops": False}
        edges, factors = gcn_norm(edge_index, num_nodes=len(x))
        matrix = torch.sparse_coo_tensor(edges.flip(0), factors, csr.shape).to_sparse_csr()
    codes = model.made(case)
    lsq.convert(codes, QuantConfig(), minimum_width=DIMENSION_MULTIPLE)
    given = {
        CSR: (model.made(case, **options), lambda: matrix),
        EDGES: (model.made(case), lambda: edge_index),
        "lsq": (codes, lambda: csr),
        "lsq, new graph": (codes, lambda: new(csr)),
    }

    def step(network: nn.Module, optimizer: torch.optim.Optimizer, graph: Run) -> None:
        cross_entropy(network(x, graph()), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    sides = {}
    for side, (network, graph) in given.items():
        if training:
            adam = Adam if network is codes else partial(torch.optim.Adam, fused=True)
            optimizer = adam(network.parameters(), lr=1e-3)
            sides[side] = partial(step, network, optimizer, graph)
        else:
            common.settle(lambda network=network: network(x, csr))
            network.eval()
            sides[side] = lambda network=network, graph=graph: network(x, graph())
    return sides


def timed(described: Mapping, sides: Mapping[str, Run], baseline: str, options) -> Iterator[dict]:
    warm_up = common.SETTLED if described["table"] == "training" else 2
    timings = common.alternate(
        sides, rounds=options.rounds, warm_up=warm_up, clock=common.clock_of(options)
    )
    for side, timing in timings.items():
        yield {
            **described,
            "side": side,
            "microseconds": 1e6 * timing.median,
            "fastest": 1e6 * timing.fastest,
            "bytes": None,
            "ratio": timings[baseline].median / timing.median,
            "ratio_of_fastest": timings[baseline].fastest / timing.fastest,
            "ratio_to_edges": timings[EDGES].median / timing.median,
        }


def sums(case: Case, options) -> Iterator[dict]:
    with torch.no_grad():
        yield from timed(case.described("sums"), sums_of(case), "torch CSR", options)


def inference(case: Case, options) -> Iterator[dict]:
    for name in options.models:
        sides = passes_of(MODELS[name], case, training=False)
        with torch.no_grad():
            yield from timed(case.described("inference", name), sides, CSR, options)


def training(case: Case, options) -> Iterator[dict]:
    for name in options.models:
        sides = passes_of(MODELS[name], case, training=True)
        yield from timed(case.described("training", name), sides, CSR, options)


def sizes(case: Case, options) -> Iterator[dict]:
    """Bytes of features and edges of a batch."""
    bare = Data(x=case.full.x, edge_index=case.full.edge_index)
    batch = case.batch
    csr = [batch.x, batch.adj_t.crow_indices(), batch.adj_t.col_indices()]
    found = {
        "float32, edge_index": batch.x.nbytes + case.edge_index.nbytes,
        "float32, CSR of int32": sum(tensor.nbytes for tensor in csr),
    }
    for bits in BITS:
        clusters = ClusterLoader(bare, parts=case.size.parts, batch=PARTS, bits=bits)
        found[f"lsq, {bits} bits"] = next(clusters.packed()).nbytes
    first = next(iter(found.values()))
    for side, count in found.items():
        yield {
            **case.described("bytes"),
            "side": side,
            "microseconds": None,
            "fastest": None,
            "bytes": count,
            "ratio": first / count,
            "ratio_of_fastest": None,
            "ratio_to_edges": first / count,
        }


TABLES = {"sums": sums, "inference": inference, "training": training, "bytes": sizes}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1, rounds=15)
    for option, known in (("graphs", SIZES), ("models", MODELS), ("tables", TABLES)):
        parser.add_argument(
            f"--{option}", nargs="+", choices=known, default=list(known), metavar="NAME"
        )
    options = common.parse(parser, arguments)
    if options.quick:
        options.graphs, options.models = options.graphs[:1], QUICK_MODELS
    table = []
    for case in cases(options.graphs, options.quick):
        for name in options.tables:
            table += TABLES[name](case, options)
            print(f"{case.name}, {name}: done", file=sys.stderr, flush=True)
    conditions = common.conditions(
        options,
        packages=("torch_geometric", "scipy", "pymetis"),
        baseline="torch CSR; in models PyG with it; of bytes float32 and edge_index",
        optimizer="lsq.optim.Adam; torch.optim.Adam(fused=True)",
        clock=common.clock_of(options).__name__,
        library=loader.description(),
    )
    common.report("graphs", table, conditions, options)


if __name__ == "__main__":
    main()
