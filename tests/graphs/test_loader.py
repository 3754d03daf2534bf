"""Batches of parts: they cover the graph, and PyTorch Geometric's layers take them."""

import itertools
import subprocess
import sys

import numpy
import pytest
import torch
from scipy import sparse
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN, GCNConv, GINConv, GraphConv, SAGEConv

from lsq import extras
from lsq.graphs import ClusterLoader, partition
from lsq.graphs.packed import Features
from tests.defaults import other_defaults

NODES = 300


def graph(loops: bool = True, **others) -> Data:
    """Directed, with nodes without edges, repeated edges and, if wanted, loops."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.randint(NODES - 20, (2, 1400), generator=generator)
    edges = torch.cat([edges, edges[:, ::7], torch.arange(0, NODES, 9).repeat(2, 1)], 1)
    edges = edges if loops else edges[:, edges[0] != edges[1]]
    return Data(
        x=torch.randn(NODES, 11, generator=generator),
        edge_index=edges,
        y=torch.randint(4, (NODES,), generator=generator),
        train_mask=torch.rand(NODES, generator=generator) < 0.5,
        **others,
    )


def as_scipy(adj_t: torch.Tensor) -> sparse.csr_matrix:
    parts = (adj_t.values(), adj_t.col_indices(), adj_t.crow_indices())
    return sparse.csr_matrix(tuple(part.numpy() for part in parts), adj_t.shape)


def matrix(data: Data) -> sparse.csr_matrix:
    sources, targets = data.edge_index.numpy()
    ones = numpy.ones(len(sources), dtype=numpy.float32)
    return sparse.coo_matrix((ones, (targets, sources)), (NODES, NODES)).tocsr()


@pytest.mark.parametrize(("parts", "batch"), [(12, 5), (12, 1), (1, 1), (NODES, 50)])
def test_an_epoch_has_each_node_once(parts, batch):
    data = graph()
    loader = ClusterLoader(data, parts=parts, batch=batch)
    batches = list(loader)
    assert len(batches) == len(loader)
    seen = torch.cat([one.n_id for one in batches])
    assert torch.equal(seen.sort().values, torch.arange(NODES))
    for one in batches:
        chosen = one.n_id.numpy()
        assert (as_scipy(one.adj_t) != matrix(data)[chosen][:, chosen]).nnz == 0
        assert "edge_index" not in one and one.num_nodes == len(chosen)
        for name in ("x", "y", "train_mask"):
            assert torch.equal(one[name], data[name][one.n_id])


def test_nodes_stand_part_by_part_and_rise_within():
    data = graph()
    loader = ClusterLoader(data, parts=12, batch=5, seed=3)
    part = partition(loader.adjacency, 12, seed=3)
    orders = []
    for one in loader:
        runs = [list(run) for _, run in itertools.groupby(one.n_id.tolist(), lambda n: part[n])]
        assert all(run == (part == part[run[0]]).nonzero().flatten().tolist() for run in runs)
        orders += [int(part[run[0]]) for run in runs]
    assert sorted(orders) == list(range(12)) != orders


@pytest.mark.parametrize(
    ("layer", "loops"),
    [
        (lambda: GCNConv(11, 6), False),  # which adds loops to a matrix that has them, too
        (lambda: GCNConv(11, 6, add_self_loops=False), True),
        (lambda: GCN(11, 8, num_layers=2, out_channels=4), False),
        (lambda: SAGEConv(11, 6), True),
        (lambda: SAGEConv(11, 6, aggr="sum"), True),
        (lambda: GINConv(torch.nn.Linear(11, 6), eps=0.5), True),
        (lambda: GraphConv(11, 6), True),
    ],
)
def test_float_layers_take_batches_in_place_of_edges(layer, loops):
    torch.manual_seed(0)
    data, layer = graph(loops), layer().eval()
    for one in ClusterLoader(data, parts=6, batch=2):
        numbers = torch.full((NODES,), -1)
        numbers[one.n_id] = torch.arange(len(one.n_id))
        edges = numbers[data.edge_index]
        expected = layer(one.x, edges[:, (edges >= 0).all(0)])
        torch.testing.assert_close(layer(one.x, one.adj_t), expected, rtol=1e-5, atol=1e-5)
    layer(one.x, one.adj_t).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def order(loader: ClusterLoader) -> list[int]:
    return torch.cat([one.n_id for one in loader]).tolist()


def test_epochs_differ_and_are_resumed():
    data = graph()
    first, second = (ClusterLoader(data, parts=12, batch=5, seed=3) for _ in range(2))
    epochs = [order(first) for _ in range(3)]
    assert first.epoch == 3 and len({tuple(epoch) for epoch in epochs}) == 3
    second.epoch = 2
    assert order(second) == epochs[2]
    assert order(ClusterLoader(data, parts=12, batch=5, seed=4)) != epochs[0]
    still = ClusterLoader(data, parts=12, batch=5, seed=3, shuffle=False)
    assert (
        order(still)
        == order(still)
        == torch.argsort(partition(still.adjacency, 12, seed=3), stable=True).tolist()
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, {0: 8, 4: 3, 1000: 2}])
def test_features_come_in_few_bits(bits):
    data = graph()
    loader = ClusterLoader(data, parts=12, batch=5, bits=bits)
    widths = bits if isinstance(bits, dict) else {0: bits}
    features = Features.of(data.x, loader.adjacency.degrees, widths)
    whole = torch.empty_like(data.x)
    for group, table in enumerate(features.tables):
        whole[features.groups == group] = features.coding.unpack(group, table)
    for packed in loader.packed():
        batch = packed.unpack()
        assert torch.equal(batch.x, whole[batch.n_id])
        floats = 16 * batch.num_edges + batch.x.nbytes + 17 * batch.num_nodes
        assert packed.nbytes < floats


@pytest.mark.parametrize("parts", [1, 12])
@pytest.mark.parametrize("bits", [None, {0: 8, 4: 3}])
def test_other_defaults_change_nothing(bits, parts):
    data, given = graph(), {"parts": parts, "batch": 1, "bits": bits}
    expected = list(ClusterLoader(data, **given))
    with other_defaults():
        found = list(ClusterLoader(data, **given))
    for one, other in zip(expected, found, strict=True):
        assert one.x.dtype == other.x.dtype and torch.equal(one.x, other.x)
        assert (as_scipy(one.adj_t) != as_scipy(other.adj_t)).nnz == 0


def test_what_belongs_to_the_graph_stays():
    data = graph(title="drawn", classes=torch.arange(4))
    data.num_nodes = NODES
    batch = next(iter(ClusterLoader(data, parts=6, batch=2)))
    assert batch.title == "drawn" and torch.equal(batch.classes, torch.arange(4))
    assert batch.num_nodes == len(batch.n_id) < NODES


def test_all_forms_of_edges_are_read():
    data = graph()
    expected = ClusterLoader(data, parts=1, batch=1).adjacency
    index = Data(x=data.x, edge_index=EdgeIndex(data.edge_index, sparse_size=(NODES, NODES)))
    rows = Data(x=data.x, adj_t=expected.to_torch())
    for other in (index, rows):
        found = ClusterLoader(other, parts=1, batch=1).adjacency
        assert torch.equal(found.indptr, expected.indptr)
        assert torch.equal(found.indices, expected.indices)


def test_the_cut_is_kept(tmp_path):
    data, file = graph(), tmp_path / "parts.safetensors"
    expected = order(ClusterLoader(data, parts=12, batch=5, file=file))
    assert order(ClusterLoader(data, parts=12, batch=5, file=file)) == expected
    with pytest.raises(ValueError, match="was cut with parts=12, not 11"):
        ClusterLoader(data, parts=11, batch=5, file=file)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_node_with_70000_neighbours(bits):
    count = 70_000
    edges = torch.stack([torch.arange(1, count + 1), torch.zeros(count, dtype=torch.int64)])
    data = Data(x=torch.ones(count + 1, 2), edge_index=edges)
    (batch,) = ClusterLoader(data, parts=1, batch=1, bits=bits)
    sums = batch.adj_t @ batch.x
    assert torch.allclose(sums[0], torch.tensor(float(count))) and not sums[1:].any()
    assert batch.adj_t.col_indices().max() == count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": 301}, "parts is 301; it must be a whole number from 1 to the number of nodes"),
        ({"parts": 0}, "parts is 0"),
        ({"batch": 7}, "batch is 7; it must be a whole number from 1 to the number of parts, 6"),
        ({"batch": 0}, "batch is 0"),
        ({"bits": 9}, "bits is 9; it must be a whole number from 2 to 8"),
        ({"bits": 1}, "bits is 1"),
        ({"bits": {4: 8}}, r"bits is {4: 8}; its keys are the least degrees of nodes: .* 0 among"),
        ({"bits": {0: 8, 9: 2.5}}, "bits is 2.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ClusterLoader(graph(), **{"parts": 6, "batch": 2, **given})


def test_graphs_that_cannot_be_are_refused():
    def refused(data: Data, message: str, **given) -> None:
        with pytest.raises(ValueError, match=message):
            ClusterLoader(data, parts=6, batch=2, **given)

    edges = graph().num_edges
    for name in ("edge_weight", "edge_attr"):
        weighted = graph(**{name: torch.rand(edges)})
        refused(weighted, f"the data has {name} with values of edges, but sums .* are unweighted")
    weights = ClusterLoader(graph(), parts=1, batch=1).adjacency.to_torch() * 2
    refused(Data(x=graph().x, adj_t=weights), "the data has adj_t with values of edges")
    refused(Data(x=graph().x), "the data has no edges that can be read; give edge_index")
    refused(Data(edge_index=graph().edge_index, num_nodes=NODES), "there are none", bits=8)
    refused(Data(edge_index=graph().edge_index, x=torch.ones(NODES)), r"float32 \[300\]", bits=8)
    broken = graph()
    broken.x[3, 1] = torch.nan
    refused(broken, "1 of 3300 values are NaN", bits=8)
    refused(graph(names=["node"] * NODES), "names has an entry for each node and cannot be sliced")
    refused(graph(n_id=torch.arange(NODES)), "n_id has an entry for each node and cannot")
    refused(graph(path_index=torch.ones(NODES + 1, NODES)), "path_index .* a row for each node")
    outside = graph()
    outside.edge_index[1, 5] = NODES
    refused(outside, "edge 5 has the nodes .*, but the graph has 300 nodes")


def test_other_data_is_refused():
    with pytest.raises(TypeError, match="data is a HeteroData; give a torch_geometric.data.Data"):
        ClusterLoader(HeteroData())


@pytest.mark.thorough
def test_without_the_extra_it_is_named():
    code = (
        "import sys; sys.modules['torch_geometric'] = sys.modules['pymetis'] = None\n"
        "from lsq.graphs import ClusterLoader\n"
        "try: ClusterLoader(None)\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "ClusterLoader needs torch_geometric, pymetis, which are not installed: "
        + extras.command("graphs")
    )
