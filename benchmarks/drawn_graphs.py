"""Draws graphs of the sizes that QGTC evaluates (Wang et al., PPoPP 2022), and smaller ones to
learn from.

Nodes have communities, some many more neighbours than others (degree-corrected stochastic blocks,
Karrer and Newman 2011). All nodes of a community have one class. Features are the centre of their
class and noise, so that one node says little and its neighbourhood more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch_geometric.data import Data


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a graph that is drawn."""

    nodes: int
    edges: int
    """Both directions of an edge count."""
    features: int
    classes: int
    community: int
    """Mean number of nodes in a community."""
    inside: float
    """Share of edges that are drawn within a community."""
    noise: float = 5.0
    """Deviation of a feature from its class's centre, whose own is 1."""
    parts: int = 1500
    """Into which METIS cuts it; 20 of them are a batch."""


SIZES = {
    name: Size(
        **dict(zip(("nodes", "edges", "features", "classes", "community"), numbers, strict=True)),
        inside=inside,
    )
    for name, numbers, inside in (
        ("Proteins", (43471, 162088, 29, 2, 39), 1.0),
        ("artist", (50515, 1638396, 100, 12, 150), 0.6),
        ("soc-BlogCatalog", (88784, 2093195, 128, 39, 200), 0.6),
        ("ppi", (56944, 818716, 50, 121, 150), 0.7),
        ("ogbn-arxiv", (169343, 1166243, 128, 40, 120), 0.7),
    )
}
"""Nodes, edges, features and classes as published; communities are a guess."""
SIZES["ogbn-products"] = Size(
    nodes=32660, edges=943874, features=100, classes=47, community=120, inside=0.75, parts=20
)
"""A batch alone, 20 of 1,500 parts: of 50 neighbours of a node, 29 are in it."""
LEARNED = Size(
    nodes=8000, edges=128000, features=96, classes=12, community=67, inside=0.28, parts=40
)
"""To learn from: small, and noisy enough that no model is right everywhere."""
QUICK = Size(nodes=300, edges=1800, features=29, classes=3, community=25, inside=0.7, parts=30)
HEAVY_TAIL = 1.8
"""Exponent of the Pareto distribution of expected degrees; the largest per mille is cut off."""
SHARES = (0.1, 0.2)
"""Shares of nodes for training and validation; the rest is for testing."""


def draw(size: Size, seed: int = 0) -> Data:
    """Draw an undirected graph without loops: x float32, y, edge_index [2, size.edges or one less],
    and masks of nodes to train on, validate and test."""
    random = numpy.random.default_rng(seed)
    communities = max(size.classes, size.nodes // size.community)
    community = random.integers(0, communities, size.nodes)
    classes = random.permutation(communities) % size.classes
    y = classes[community]
    order = random.permutation(size.nodes)
    ends = numpy.round(numpy.cumsum(SHARES) * size.nodes).astype(int)
    masks = torch.zeros(3, size.nodes, dtype=torch.bool)
    for mask, nodes in zip(masks, numpy.split(order, ends), strict=True):
        mask[nodes] = True
    return Data(
        x=_features(y, size, random),
        y=torch.from_numpy(y),
        edge_index=_edges(community, size, random),
        **dict(zip(("train_mask", "val_mask", "test_mask"), masks, strict=True)),
    )


def _features(classes: numpy.ndarray, size: Size, random: numpy.random.Generator) -> torch.Tensor:
    centres = random.normal(size=(size.classes, size.features))
    x = centres[classes] + size.noise * random.normal(size=(len(classes), size.features))
    return torch.from_numpy((x / x.std()).astype(numpy.float32))


def _edges(community: numpy.ndarray, size: Size, random: numpy.random.Generator) -> torch.Tensor:
    """Draw pairs of nodes until there are enough different ones."""
    expected = random.pareto(HEAVY_TAIL, size.nodes) + 0.3
    expected = numpy.minimum(expected, numpy.quantile(expected, 0.999))
    order = numpy.argsort(community, kind="stable")
    begins = numpy.searchsorted(community[order], numpy.arange(community.max() + 2))
    sums = numpy.concatenate([[0], numpy.cumsum(expected[order])])

    def pick(low: numpy.ndarray, high: numpy.ndarray) -> numpy.ndarray:
        """A node of each range, by expected degree."""
        drawn = sums[low] + random.random(len(low)) * (sums[high] - sums[low])
        return order[numpy.clip(numpy.searchsorted(sums, drawn, side="right") - 1, low, high - 1)]

    wanted, pairs = size.edges // 2, numpy.empty(0, dtype=numpy.int64)
    while len(pairs) < wanted:
        low, high = numpy.zeros(wanted, dtype=int), numpy.full(wanted, size.nodes)
        source = pick(low, high)
        inside, own = random.random(wanted) < size.inside, community[source]
        target = pick(
            numpy.where(inside, begins[own], low), numpy.where(inside, begins[own + 1], high)
        )
        drawn = numpy.minimum(source, target) * size.nodes + numpy.maximum(source, target)
        pairs = numpy.union1d(pairs, drawn[source != target])
    pairs = random.choice(pairs, wanted, replace=False)
    one, other = torch.from_numpy(pairs // size.nodes), torch.from_numpy(pairs % size.nodes)
    return torch.stack([torch.cat([one, other]), torch.cat([other, one])])


@dataclass(frozen=True, kw_only=True)
class Small:
    """Sizes of small dense graphs, whose class is to be found."""

    classes: int = 4
    least: int = 20
    most: int = 40
    """Nodes of a graph."""
    features: int = 32
    noise: float = 6.0
    """See Size.noise: of the classes of whole graphs here."""
    density: float = 0.3
    """Share of pairs of nodes that have an edge: of all classes the same."""


SMALL = Small()


def draw_small(count: int, size: Small = SMALL, seed: int = 0) -> Iterator[Data]:
    """Draw small graphs: one of class c falls into c + 1 communities.

    Nearly all edges lie within a community, as many as the density asks for.
    """
    random = numpy.random.default_rng(seed)
    centres = random.normal(size=(size.classes, size.features))
    for _ in range(count):
        label, nodes = random.integers(size.classes), random.integers(size.least, size.most + 1)
        community = random.integers(0, label + 1, nodes)
        together = community[:, None] == community
        chance = numpy.where(together, 0.9, 0.1)
        chance *= size.density / chance.mean()
        upper = numpy.triu(random.random((nodes, nodes)) < chance, 1)
        x = centres[label] + size.noise * random.normal(size=(nodes, size.features))
        yield Data(
            x=torch.from_numpy((x / size.noise).astype(numpy.float32)),
            y=torch.tensor([int(label)]),
            edge_index=torch.from_numpy(numpy.stack(numpy.nonzero(upper | upper.T))),
        )
