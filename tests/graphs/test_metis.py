"""Parts of graphs: networkx counts what they cut, and files are damaged."""

import logging
import sys

import networkx
import pytest
import torch
from safetensors.torch import load_file, save_file

from lsq import extras
from lsq.graphs import Adjacency, metis, partition


def adjacency_of(graph: networkx.Graph) -> Adjacency:
    """Each edge both ways."""
    directed = graph.to_directed() if not graph.is_directed() else graph
    edges = torch.tensor(list(directed.edges), dtype=torch.int64).view(-1, 2).t()
    return Adjacency.from_edges(edges, len(graph))


def blocks() -> networkx.Graph:
    """Six communities of 40 nodes."""
    return networkx.planted_partition_graph(6, 40, 0.3, 0.005, seed=3)


def cut(graph: networkx.Graph, part: torch.Tensor) -> int:
    sets = [set((part == one).nonzero().flatten().tolist()) for one in part.unique()]
    assert networkx.community.is_partition(graph, sets)
    inside = sum(graph.subgraph(one).number_of_edges() for one in sets)
    return graph.number_of_edges() - inside


def test_communities_are_found():
    graph = blocks()
    part = partition(adjacency_of(graph), 6)
    assert part.dtype == torch.int32 and part.shape == (240,)
    assert part.bincount(minlength=6).tolist() == [40] * 6
    planted = torch.arange(240) // 40
    assert cut(graph, part) == cut(graph, planted)
    shuffled = planted[torch.randperm(240, generator=torch.Generator().manual_seed(0))]
    assert cut(graph, part) < 0.2 * cut(graph, shuffled)


def test_the_seed_decides():
    adjacency = adjacency_of(networkx.gnm_random_graph(3000, 9000, seed=1))
    found = [partition(adjacency, 12, seed=seed) for seed in (0, 0, 7)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("parts", [1, 2, 29, 30])
@pytest.mark.parametrize("graph", [networkx.empty_graph(30), networkx.star_graph(29)])
def test_nodes_without_edges_and_many_parts(graph, parts):
    part = partition(adjacency_of(graph), parts)
    assert part.shape == (30,) and 0 <= part.min() and part.max() < parts
    cut(graph, part)


def test_loops_repeats_and_directions_change_nothing(caplog):
    graph = blocks()
    both = torch.tensor(list(graph.to_directed().edges)).t()
    loops = torch.arange(0, 240, 3).repeat(2, 1)
    once = torch.tensor(list(graph.edges)).t()
    expected = partition(Adjacency.from_edges(both, 240), 6)
    repeated = torch.cat([both, both[:, ::2], loops], 1)
    assert torch.equal(partition(Adjacency.from_edges(repeated, 240), 6), expected)
    assert not caplog.records
    assert torch.equal(partition(Adjacency.from_edges(once, 240), 6), expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "the graph is not symmetric" in record.message


@pytest.mark.parametrize(
    ("parts", "seed", "message"),
    [
        (31, 0, "parts is 31; it must be a whole number from 1 to the number of nodes, 30"),
        (0, 0, "parts is 0"),
        (2.0, 0, "parts is 2.0"),
        (2, -1, "seed is -1; it must be a whole number from 0 to 2147483647"),
        (2, 2**31, "seed is 2147483648"),
    ],
)
def test_what_cannot_be_cut_is_refused(parts, seed, message):
    with pytest.raises(ValueError, match=message):
        partition(adjacency_of(networkx.path_graph(30)), parts, seed)


def test_without_pymetis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    adjacency = adjacency_of(networkx.path_graph(30))
    assert not partition(adjacency, 1).any()
    with pytest.raises(extras.MissingPackage) as raised:
        partition(adjacency, 2)
    assert str(raised.value) == (
        "partition needs pymetis, which is not installed: " + extras.command("graphs")
    )


@pytest.fixture
def kept(tmp_path):
    """(a graph, the file of its partition into 6 parts)"""
    adjacency = adjacency_of(blocks())
    partition(adjacency, 6, file=tmp_path / "new" / "parts.safetensors")
    return adjacency, tmp_path / "new" / "parts.safetensors"


def test_a_file_is_read_in_place_of_cutting(kept, monkeypatch):
    adjacency, path = kept
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    expected = partition(adjacency, 6)
    monkeypatch.setattr(metis, "_cut", None)
    assert torch.equal(partition(adjacency, 6, file=str(path)), expected)


def test_files_of_something_else_are_refused(kept):
    adjacency, path = kept
    other = Adjacency(indptr=adjacency.indptr, indices=adjacency.indices.flip(0))
    with pytest.raises(ValueError, match="is the partition of another graph; remove it, and it"):
        partition(other, 6, file=path)
    with pytest.raises(ValueError, match="was cut with parts=6, not 5; give parts=6, or remove"):
        partition(adjacency, 5, file=path)
    with pytest.raises(ValueError, match="was cut with seed=0, not 4; give seed=0, or remove it"):
        partition(adjacency, 6, seed=4, file=path)


def test_damaged_files_are_refused(kept):
    adjacency, path = kept
    content = path.read_bytes()
    for damaged in (content[:-1], content[:40], b"", content[:-8] + b"\7" + content[-7:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"parts.safetensors is damaged.*; remove it, and it"):
            partition(adjacency, 6, file=path)
    path.write_bytes(content)
    save_file({"parts": load_file(path)["part"]}, path)
    with pytest.raises(ValueError, match="is damaged, or no partition"):
        partition(adjacency, 6, file=path)
