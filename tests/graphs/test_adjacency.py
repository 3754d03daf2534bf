"""Adjacency beside scipy's sparse matrices."""

import numpy
import pytest
import torch
from scipy import sparse

from lsq.graphs import Adjacency
from lsq.native import loader

EDGES = torch.tensor([[2, 0, 4, 0, 3, 3], [1, 1, 0, 1, 3, 0]])
"""Of six nodes: an edge twice, an edge to its own node, and two nodes without edges to them."""


@pytest.fixture(params=["library", "torch"])
def sorter(request, monkeypatch):
    """Edges are sorted and chosen by the C++ library, or by PyTorch as on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(loader, "available", lambda: False)


def drawn(nodes: int, edges: int) -> torch.Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(nodes))


def matrix(edges: torch.Tensor, nodes: int) -> numpy.ndarray:
    """By scipy, which adds up repeated entries."""
    sources, targets = edges.numpy()
    counts = numpy.ones(len(sources), dtype=numpy.int64)
    return sparse.coo_matrix((counts, (targets, sources)), (nodes, nodes)).toarray()


def as_scipy(graph: Adjacency) -> sparse.csr_matrix:
    ones = numpy.ones(graph.edges, dtype=numpy.int64)
    parts = (ones, graph.indices.numpy(), graph.indptr.numpy())
    return sparse.csr_matrix(parts, (graph.nodes, graph.nodes))


@pytest.mark.parametrize(
    ("edges", "nodes"), [(EDGES, 6), (drawn(37, 400), 37), (drawn(300, 5), 300), (EDGES[:, :0], 3)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_edges_are_counted_by_target_and_source(sorter, edges, nodes, dtype):
    found = Adjacency.from_edges(edges.to(dtype), nodes)
    expected = matrix(edges, nodes)
    assert (found.nodes, found.edges) == (nodes, edges.shape[1])
    assert numpy.array_equal(found.to_torch().to_dense().numpy(), expected)
    assert numpy.array_equal(found.degrees.numpy(), expected.sum(1))
    assert numpy.array_equal(found.transposed.to_torch().to_dense().numpy(), expected.T)
    assert found.transposed.transposed is found
    again = Adjacency.from_csr(found.indptr.long(), found.indices)
    assert torch.equal(again.indptr, found.indptr) and torch.equal(again.indices, found.indices)
    assert {one.dtype for one in (found.indptr, found.indices, found.degrees)} == {torch.int32}


def test_sources_keep_their_order(sorter):
    found = Adjacency.from_edges(EDGES)
    assert found.nodes == 5
    assert found.indptr.tolist() == [0, 2, 5, 5, 6, 6]
    assert found.indices.tolist() == [4, 3, 2, 0, 0, 3]
    assert found.targets.tolist() == [0, 0, 1, 1, 1, 3]
    transposed = found.transposed
    assert transposed.indptr.tolist() == [0, 2, 2, 3, 5, 6]
    assert transposed.indices.tolist() == [1, 1, 1, 0, 3, 0]


@pytest.mark.parametrize(
    ("edges", "nodes", "chosen"),
    [
        (EDGES, 6, [4, 1, 3, 0]),
        (EDGES, 6, [5, 2]),
        (EDGES, 6, []),
        (drawn(37, 400), 37, range(0, 37, 2)),
        (drawn(300, 5000), 300, range(299, 17, -1)),
        (drawn(70_000, 90_000), 70_000, range(3, 70_000, 3)),
    ],
)
def test_a_subgraph_is_a_slice_of_the_matrix(sorter, edges, nodes, chosen):
    whole = Adjacency.from_edges(edges, nodes)
    found = whole.subgraph(torch.tensor(chosen, dtype=torch.int64))
    chosen = numpy.array(chosen, dtype=numpy.int64)
    expected = as_scipy(whole)[chosen][:, chosen]
    assert found.nodes == len(chosen)
    assert (as_scipy(found) != expected).nnz == 0
    assert found.edges == expected.sum()
    assert {one.dtype for one in (found.indptr, found.indices)} == {torch.int32}


def test_a_subgraph_keeps_the_order_of_edges(sorter):
    found = Adjacency.from_edges(EDGES).subgraph(torch.tensor([3, 1, 0], dtype=torch.int32))
    assert found.indptr.tolist() == [0, 1, 3, 4]
    assert found.indices.tolist() == [0, 2, 2, 0]


def test_a_node_may_have_70000_edges(sorter):
    sources = torch.arange(70_000).flip(0)
    found = Adjacency.from_edges(torch.stack([sources, torch.ones_like(sources)]))
    assert found.degrees[:3].tolist() == [0, 70_000, 0]
    assert torch.equal(found.indices, sources.int())
    assert torch.equal(found.transposed.degrees, torch.ones(70_000, dtype=torch.int32))


def test_sums_are_those_of_adding_each_edge():
    edges, x = drawn(50, 700), torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(50, 3, dtype=torch.float64)
    for source, target in edges.t().tolist():
        expected[target] += x[source].double()
    found = Adjacency.from_edges(edges, 50).to_torch(torch.float64) @ x.double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_device_that_it_is_on_copies_nothing():
    found = Adjacency.from_edges(EDGES)
    assert found.to("cpu") is found
    assert found.to("meta").indptr.device.type == "meta"


@pytest.mark.parametrize(
    ("edges", "nodes", "message"),
    [
        (EDGES.float(), 6, r"edges are torch.float32 \[2, 6\]; give whole numbers \[2, edges\]"),
        (EDGES.t(), 6, r"edges are torch.int64 \[6, 2\]"),
        (EDGES[0], 6, r"edges are torch.int64 \[6\]"),
        (EDGES, 4, r"edge 2 has the nodes \[4, 0\], but the graph has 4 nodes: .* below 4"),
        (EDGES.int(), 4, r"edge 2 has the nodes \[4, 0\], but the graph has 4 nodes: .* below 4"),
        (EDGES - 1, 6, r"edge 1 has the nodes \[-1, 0\], but the graph has 6 nodes"),
        (EDGES, 2**31, "the graph has 2,147,483,648 nodes; it may have 0 to 2,147,483,647"),
        (EDGES[:, :0], -1, "the graph has -1 nodes"),
    ],
)
def test_edges_that_cannot_be_are_refused(sorter, edges, nodes, message):
    with pytest.raises(ValueError, match=message):
        Adjacency.from_edges(edges, nodes)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], "indptr falls from 2 to 1 at node 1"),
        ([1, 2, 3], [0, 1, 1], "begins with 1 and ends with 3; .* number of edges, 3"),
        ([0, 2, 2], [0, 1, 1], "begins with 0 and ends with 2"),
        ([], [], "indptr is empty"),
        ([0, 1, 3], [0, 1, 2], r"edge 2 has the nodes \[2\], but the graph has 2 nodes"),
        ([0, 1, 3], [[0, 1, 1]], r"indices is torch.int64 \[1, 3\]"),
        ([0.0, 1.0], [0], r"indptr is torch.float32 \[2\]"),
    ],
)
def test_rows_that_cannot_be_are_refused(indptr, indices, message):
    whole = {} if indptr and isinstance(indptr[0], float) else {"dtype": torch.int64}
    with pytest.raises(ValueError, match=message):
        Adjacency.from_csr(torch.tensor(indptr, **whole), torch.tensor(indices, dtype=torch.int64))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (torch.tensor([1, 6, -1]), "node 6 is not in the graph, whose nodes are 0 to 5"),
        (torch.tensor([1, -1]), "node -1 is not in the graph"),
        (torch.tensor([3, 1, 0, 1]), "node 1 is given twice; give each node once"),
        (torch.tensor([[3, 1]]), r"nodes are torch.int64 \[1, 2\]; give whole numbers in one"),
        (torch.ones(6, dtype=torch.bool), r"nodes are torch.bool \[6\]"),
    ],
)
def test_nodes_that_cannot_be_chosen_are_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        Adjacency.from_edges(EDGES, 6).subgraph(nodes)
