"""Drawn graphs have the sizes that were asked for, and something to learn from."""

import dataclasses

import pytest
import torch

pytest.importorskip("torch_geometric")
from drawn_graphs import QUICK, SIZES, Small, draw, draw_small  # noqa: E402
from torch_geometric.utils import to_dense_adj  # noqa: E402


@pytest.mark.parametrize("size", [QUICK, dataclasses.replace(QUICK, inside=1.0, community=60)])
def test_a_graph_has_its_size(size):
    graph = draw(size)
    assert graph.x.shape == (size.nodes, size.features) and graph.x.dtype == torch.float32
    assert graph.edge_index.shape == (2, size.edges)
    assert len(graph.edge_index.unique(dim=1)[0]) == size.edges
    assert graph.is_undirected() and not graph.has_self_loops()
    assert set(graph.y.tolist()) == set(range(size.classes))
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert (masks.sum(0) == 1).all() and masks.sum(1).tolist() == [30, 60, 210]
    degrees = graph.edge_index[0].bincount(minlength=size.nodes)
    assert degrees.max() > 3 * degrees.float().mean()
    alike = graph.y[graph.edge_index[0]] == graph.y[graph.edge_index[1]]
    assert alike.all() if size.inside == 1 else 0.7 < alike.float().mean() < 0.9


def test_a_seed_draws_one_graph():
    first, again, other = draw(QUICK, 1), draw(QUICK, 1), draw(QUICK, 2)
    for name in ("x", "y", "edge_index", "train_mask"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_neighbours_say_more_than_a_node():
    graph = draw(dataclasses.replace(QUICK, nodes=1000, edges=20000, noise=4.0))
    ones = torch.ones(graph.num_edges)
    adjacency = torch.sparse_coo_tensor(graph.edge_index, ones, (1000, 1000))
    centres = torch.stack([graph.x[graph.y == label].mean(0) for label in range(3)])
    right = [(x @ centres.T).argmax(1) == graph.y for x in (graph.x, adjacency @ graph.x)]
    alone, together = (one.float().mean() for one in right)
    assert 0.5 < alone < together - 0.1


def test_published_sizes():
    found = {name: (size.nodes, size.edges, size.features) for name, size in SIZES.items()}
    assert found["Proteins"] == (43471, 162088, 29) and len(found) == 6


def test_small_graphs_differ_by_their_communities_alone():
    graphs = list(draw_small(200, Small(least=30, most=30)))
    dense = torch.stack([to_dense_adj(graph.edge_index, max_num_nodes=30)[0] for graph in graphs])
    assert torch.equal(dense, dense.mT) and not dense.diagonal(dim1=1, dim2=2).any()
    labels = torch.cat([graph.y for graph in graphs])
    density = [dense[labels == label].mean().item() for label in range(4)]
    assert max(density) - min(density) < 0.03 and 0.26 < min(density)
    triangles = torch.stack([one.matrix_power(3).trace() for one in dense])
    mean = [triangles[labels == label].mean().item() for label in range(4)]
    assert mean == sorted(mean) and mean[3] > 1.5 * mean[0]
    assert {graph.num_nodes for graph in draw_small(50)} <= set(range(20, 41))
