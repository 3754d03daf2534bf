"""Bits of nodes and layers of graph networks: costs and budgets against plain formulas."""

import copy
import itertools

import numpy
import pytest
import torch
from torch import nn

geometric = pytest.importorskip("torch_geometric.nn")

import lsq  # noqa: E402
from lsq.config import QuantConfig  # noqa: E402
from lsq.models import set_node_bits  # noqa: E402
from lsq.study.graph_allocation import GraphAllocator, buckets_of  # noqa: E402
from lsq.study.knapsack import exact  # noqa: E402
from lsq.study.search import Search  # noqa: E402
from tests.ops.compare import refused  # noqa: E402
from tests.sampling import first  # noqa: E402

NODES, INPUTS, HIDDEN, CLASSES = 30, 12, 16, 16
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")


def edges() -> torch.Tensor:
    """Directed; later nodes have more edges that lead to them."""
    chance = torch.Generator().manual_seed(1)
    targets = (torch.rand(140, generator=chance).sqrt() * NODES).long()
    return torch.stack([torch.randint(NODES, (140,), generator=chance), targets])


def features() -> torch.Tensor:
    return torch.randn(NODES, INPUTS, generator=torch.Generator().manual_seed(2))


class Headed(nn.Module):
    """A GraphConv with a layer of classes behind it."""

    def __init__(self):
        super().__init__()
        self.nodes = geometric.GraphConv(INPUTS, HIDDEN)
        self.classes = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, edge_index):
        return self.classes(self.nodes(x, edge_index).relu())


MODELS = {
    "GCN": lambda: geometric.GCN(INPUTS, HIDDEN, 2, CLASSES, dropout=0.5),
    "GraphSAGE": lambda: geometric.GraphSAGE(INPUTS, HIDDEN, 2, CLASSES),
    "GIN": lambda: geometric.GIN(INPUTS, HIDDEN, 2, CLASSES, norm="batch_norm"),
    "GCNConv": lambda: geometric.GCNConv(INPUTS, CLASSES),
    "Headed": Headed,
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[kind]()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 if kind == "GIN" else 3)  # so that bits matter
    return model


def allocator(kind: str = "GCN", **options) -> GraphAllocator:
    options = {"buckets": 2, "widths": (2, 4, 8), "by_layer": False, **options}
    return GraphAllocator(model_of(kind), features(), edges(), **options)


@pytest.fixture(scope="module")
def shared() -> GraphAllocator:
    return allocator()


def divergence(before: torch.Tensor, now: torch.Tensor) -> float:
    p, q = (one.double().softmax(1).numpy() for one in (before, now))
    return float((p * numpy.log(p / q)).sum(1).mean())


@torch.no_grad()
def said(model: nn.Module) -> torch.Tensor:
    return model.eval()(features(), edges())


def test_buckets_have_nearly_equal_counts():
    degrees = torch.tensor([5, 0, 1, 1, 7, 2, 2, 3, 3, 9, 8, 6])
    found = buckets_of(degrees, 4)
    assert sum(found.values()) == 12 and list(found)[0] == 0 and list(found) == sorted(found)
    ends = [*list(found)[1:], 10]
    for (least, count), end in zip(found.items(), ends, strict=True):
        assert count == int(((degrees >= least) & (degrees < end)).sum())
        assert abs(count - 3) <= 1


def test_nodes_of_one_degree_are_in_one_bucket():
    degrees = torch.tensor([4] * 9 + [6])
    assert buckets_of(degrees, 3) == {0: 9, 6: 1}
    assert buckets_of(torch.full((7,), 3), 4) == {0: 7}
    assert buckets_of(torch.tensor([2, 5, 5, 8]), 9) == {0: 1, 5: 2, 8: 1}
    assert buckets_of(torch.arange(10), 1) == {0: 10}
    with refused("there shall be 0 buckets of nodes; give 1 at least"):
        buckets_of(degrees, 0)


def test_memory_and_computation_are_those_of_the_formulas():
    found = allocator(by_layer=True)
    (low, first), (high, second) = found.buckets.items()
    sources, targets = edges()
    degrees = targets[sources != targets].bincount(minlength=NODES)  # GCN has its own loops
    assert (low, second) == (0, int((degrees >= high).sum())) and first + second == NODES
    # 2 bits for few neighbours, 8 for many; weights x activations of 4 x 8 and 2 x 4 bits
    picked = (0, 2, found.pairs.index((4, 8)), found.pairs.index((2, 4)))
    memory, computation = found.takes(picked)
    bits = (first * 2 + second * 8) * (INPUTS + HIDDEN)
    assert memory == (bits + INPUTS * HIDDEN * 4 + HIDDEN * CLASSES * 2) / 8
    assert computation == NODES * (INPUTS * HIDDEN * 4 * 8 + HIDDEN * CLASSES * 2 * 4)
    problem = found.problem(memory=1000, computation=1e6)
    assert problem.budgets == (8000, 1e6)
    assert problem.takes(picked).tolist() == [8 * memory, computation]
    assert found.problem(computation=1e6).takes(picked).tolist() == [computation]
    assert [len(item.choices) for item in problem.items] == [3, 3, 9, 9]


def test_other_layers_have_weights_and_activations_but_no_rows_of_nodes():
    found = allocator("Headed", by_layer=True)
    assert list(found.layers) == ["nodes", "classes"]
    memory, computation = found.takes(found.uniform(4))
    weights = 2 * INPUTS * HIDDEN + HIDDEN * CLASSES  # GraphConv multiplies a node's own row, too
    assert memory == 4 * (NODES * INPUTS + weights) / 8
    assert computation == 16 * NODES * weights


@pytest.mark.parametrize("kind", first(MODELS, 2))
def test_equal_bits_are_those_of_a_converted_model(kind):
    found = allocator(kind)
    floats = said(model_of(kind))
    for bits in (2, 8):
        model = model_of(kind).eval()
        quant = QuantConfig(bits=bits, weight_format=f"int{bits}/row")
        lsq.convert(model, quant, minimum_width=4)
        assert torch.equal(found.predictions(found.uniform(bits)), said(model))
        expected = divergence(floats, said(model))
        assert found.measure(found.uniform(bits)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", first(MODELS, 2))
@pytest.mark.parametrize("by_layer", [True, False])
def test_an_allocation_predicts_what_was_measured(kind, by_layer):
    found = allocator(kind, by_layer=by_layer)
    layers = [7, 3][: len(found.groups)]  # pairs 8 x 4, 4 x 2
    picked = (0, 1, *layers)
    model = model_of(kind).train()
    chosen = found.allocation(picked)
    chosen.convert(model, features(), edges())
    assert all(one.training for one in model.modules())
    assert torch.equal(said(model), found.predictions(picked))
    both = {
        one.node_bits and tuple(one.node_bits.values())
        for one in model.modules()
        if hasattr(one, "node_bits")
    }
    assert both <= {(2, 4), (2, 2)} and (2, 4) in both


def test_layers_of_a_fused_model_have_formats_by_name():
    found = allocator(by_layer=True)
    chosen = found.allocation((1, 2, found.pairs.index((2, 8)), found.pairs.index((4, 8))))
    assert chosen.weight_format == "int2/row,convs.1.*=int4/row"
    assert chosen.node_bits == dict(zip(found.buckets, (4, 8), strict=True))
    (quant,) = chosen.configs.values()
    model = model_of("GCN")
    chosen.convert(model, features(), edges())
    assert model.quant.bits == quant.bits == 8 and model.node_bits == chosen.node_bits
    # by hand, with clips that are measured for 6 bits, the mean of 4 and 8
    plain, narrow = model_of("GCN"), model_of("GCN")
    for one, bits in ((plain, 8), (narrow, 6)):
        format = QuantConfig(bits=bits, weight_format=chosen.weight_format)
        lsq.convert(one, format, minimum_width=4)
        said(one)
    set_node_bits(plain, chosen.node_bits)
    for name, clip in plain.activation_clips().items():
        clip.data.copy_(narrow.activation_clips()[name])
    assert torch.equal(said(model), said(plain))


def test_costs_are_of_one_item_and_predictions_of_some_nodes():
    nodes = torch.arange(NODES) % 3 == 0
    found, floats = allocator(nodes=nodes), said(model_of("GCN"))
    widest = found.uniform(8)
    assert [len(costs) for costs in found.costs] == [3, 3, 9]
    for number, costs in enumerate(found.costs):
        for one, cost in enumerate(costs):
            mix = (*widest[:number], one, *widest[number + 1 :])
            expected = divergence(floats[nodes], found.predictions(mix)[nodes])
            assert cost == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("bits", [3, 4, 5])
@pytest.mark.parametrize("computes", [True, False])
def test_the_knapsack_is_that_of_brute_force(shared, bits, computes):
    found = shared
    memory, computation = (
        limit * (bits / 4) ** power
        for limit, power in zip(found.takes(found.uniform(4)), (1, 2), strict=True)
    )
    budgets = {"memory": memory, **({"computation": computation} if computes else {})}
    problem, picked = found.problem(**budgets), found.picked(**budgets)
    every = [
        mix
        for mix in itertools.product(*(range(len(item.choices)) for item in problem.items))
        if found.takes(mix)[0] <= memory and (found.takes(mix)[1] <= computation or not computes)
    ]
    assert picked in every and picked == exact(problem)
    least = min(map(problem.cost, every))
    assert problem.cost(picked) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("activations", [True, False])
def test_a_search_comes_near_the_best_of_all_mixes(activations):
    found = allocator(activations=activations, widths=(2, 3, 8))
    memory, computation = found.takes(found.uniform(3))
    budgets = {"memory": memory, **({"computation": computation} if activations else {})}
    problem = found.problem(**budgets)
    every = itertools.product(*(range(len(item.choices)) for item in problem.items))
    least = min(found.measure(mix) for mix in every if problem.fits(mix))
    best = found.search(**budgets)
    assert problem.fits(best)
    others = found.measure(found.picked(**budgets)), found.measure(found.uniform(3))
    assert least <= found.measure(best) <= min(1.2 * least, *others)
    first = found.search(**budgets, how=Search(mixes=1))
    assert first == found.picked(**budgets)


def test_activations_may_have_the_largest_width():
    found = allocator(activations=False)
    assert found.pairs == [(2, 8), (4, 8), (8, 8)]
    chosen = found.allocation(found.uniform(4))
    assert set(chosen.activations.values()) == {8} and set(chosen.weights.values()) == {4}
    names = {choice.name for item in found.problem(memory=9e9).items for choice in item.choices}
    assert names == {"2", "4", "8"}


def test_the_given_model_stays():
    model = model_of("GCN").train()
    before = copy.deepcopy(model.state_dict())
    GraphAllocator(model, features(), edges(), widths=(2, 8)).picked(memory=1e6)
    assert type(model) is geometric.GCN and model.training
    assert all(one.requires_grad for one in model.parameters())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_what_is_refused(shared):
    found = shared
    for given in ({"memory": -1}, {"computation": 0.0}, {"memory": float("nan")}):
        with refused(f"{next(iter(given))} is .*; it must be a finite number above 0"):
            found.search(**given)
    with refused("there is no budget; give memory or computation"):
        found.problem()
    memory, computation = found.takes(found.uniform(2))
    least = f"2 bits everywhere take {memory:,.0f} bytes and a computation of {computation:,.0f}"
    with refused(f"memory is 5, computation 70, but {least}; give larger budgets"):
        found.picked(memory=5, computation=70)
    with refused("there are no widths; give one at least"):
        allocator(widths=())
    with refused(r"3 bits everywhere are not among the widths \(2, 4, 8\)"):
        found.uniform(3)
    with refused("bits is 9"):
        allocator(widths=(9,))
    with refused("no layer of this Linear becomes a graph layer of lsq; give a model of GCNConv"):
        GraphAllocator(nn.Linear(16, 16), features(), edges())
    with refused(r"edges are \[140\], torch.strided; give dense \[2, E\]"):
        GraphAllocator(model_of("GCN"), features(), edges()[0])
