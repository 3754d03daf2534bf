"""Graph layers of PyTorch Geometric as programs: against its own code, and in int8."""

import copy
import io
import itertools
import pickle
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import lsq
from lsq.graphs import Adjacency
from lsq.layers.memory import plan_memory
from lsq.models import set_node_bits
from lsq.models.batch import _recent
from lsq.models.sparsity import sparsify
from lsq.observe.statistics import observe
from lsq.study.sensitivity import sensitivity
from tests.defaults import other_defaults
from tests.layers.shapes import decibels
from tests.sampling import first

geometric = pytest.importorskip("torch_geometric")
from torch_geometric.explain import Explainer, GNNExplainer  # noqa: E402
from torch_geometric.nn import (  # noqa: E402
    GCN,
    MLP,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    SAGEConv,
    SumAggregation,
)

FLOAT, INT8 = lsq.QuantConfig(mode="float"), lsq.QuantConfig()
NODES, WIDTH = 23, 13
pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")


def drawn() -> torch.Tensor:
    """Edges [2, E]: some twice, some from a node to itself, and three nodes without any."""
    made = torch.randint(NODES - 3, (2, 71), generator=torch.Generator().manual_seed(3))
    return torch.cat([made, made[:, :9], torch.tensor([[2, 5, 5], [2, 5, 5]])], dim=1)


EDGES = drawn()
UNIQUE = EDGES.unique(dim=1)
X = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(4))


def sparse(edges: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """A CSR tensor, rows are targets."""
    values = torch.ones(edges.shape[1]) if values is None else values
    made = torch.sparse_coo_tensor(edges.flip(0), values, (NODES, NODES)).coalesce()
    return made.to_sparse_csr()


GRAPHS = {
    "int64": EDGES,
    "int32": EDGES.int(),
    "EdgeIndex": geometric.EdgeIndex(EDGES, sparse_size=(NODES, NODES)),
    "sorted": geometric.EdgeIndex(EDGES, sparse_size=(NODES, NODES)).sort_by("col").values,
    "csr": sparse(UNIQUE),
    "csr with repeated edges": Adjacency.from_edges(EDGES, NODES).to_torch(),
    "coo": sparse(UNIQUE).to_sparse_coo(),
    "no edges": EDGES[:, :0],
}


def gin(out: int = 19, **options) -> GINConv:
    layers = nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, out)
    return GINConv(nn.Sequential(*layers), **options)


KINDS = {
    "GCNConv": lambda: GCNConv(WIDTH, 19),
    "SAGEConv": lambda: SAGEConv(WIDTH, 19),
    "GINConv": lambda: gin(train_eps=True),
    "GraphConv": lambda: GraphConv(WIDTH, 19),
    "GCN": lambda: GCN(WIDTH, 32, 3, 7),
    "GraphSAGE": lambda: GraphSAGE(WIDTH, 32, 3, 7),
}


def options_of(kind: type, **choices) -> dict:
    """Name -> function that makes a layer, for all combinations of options."""
    every = [dict(zip(choices, one, strict=True)) for one in itertools.product(*choices.values())]
    return {f"{kind.__name__} {one}": lambda one=one: kind(WIDTH, 19, **one) for one in every}


LAYERS = {
    **options_of(GCNConv, improved=[False, True], bias=[True, False], cached=[False, True]),
    **options_of(GCNConv, improved=[False, True], add_self_loops=[False], bias=[True]),
    **options_of(GCNConv, normalize=[False], bias=[True, False]),
    **options_of(
        SAGEConv,
        aggr=["mean", "sum", "add"],
        root_weight=[True, False],
        normalize=[True, False],
        bias=[True, False],
    ),
    **options_of(GraphConv, aggr=["mean", "sum", "add"], bias=[True, False]),
    **{
        f"GINConv {eps} {train}": lambda eps=eps, train=train: gin(eps=eps, train_eps=train)
        for eps in (0.0, 0.3)
        for train in (True, False)
    },
    "GINConv of an MLP": lambda: GINConv(MLP([WIDTH, 32, 19], norm="batch_norm"), train_eps=True),
    **{
        f"{kind.__name__} {layers} {out} {act} {bias}": partial(
            kind, WIDTH, 32, layers, out, act=act, bias=bias
        )
        for kind in (GCN, GraphSAGE)
        for layers in (1, 2, 3)
        for out in (None, 7)
        for act in ("relu", "gelu", "silu", None)
        for bias in (True, False)
    },
}
FEW = [name for number, name in enumerate(LAYERS) if number % 9 == 0]


def both(make, quant: lsq.QuantConfig = FLOAT, **options) -> tuple[nn.Module, nn.Module]:
    """A float model, and a converted copy."""
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    mine = copy.deepcopy(model)
    assert lsq.convert(mine, quant, **options).fused
    return model, mine


def gradients(model: nn.Module, x: torch.Tensor, edges, *others) -> dict[str, torch.Tensor]:
    """The result and all gradients of one pass, by name."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x, edges, *others)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    (y * weight).sum().backward()
    parameters = dict(model.named_parameters()).items()
    own = {name: one.grad for name, one in parameters if not name.endswith("_clip")}
    return {"y": y.detach(), "x": x.grad, **own}


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference, relative to the largest value if that is above 1."""
    assert expected.shape == found.shape
    away = (expected.double() - found.double()).abs().max()
    return (away / expected.double().abs().max().clamp(min=1)).item()


def check_same(make, graph: str) -> None:
    model, mine = both(make)
    exact = model.double() if graph != "sorted" else model  # its EdgeIndex multiplies float32 alone
    edges = GRAPHS[graph]
    theirs = edges.long() if edges.dtype == torch.int32 else edges  # whose int32 has no gradients
    theirs = edges.double() if edges.dtype == torch.float32 else theirs
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a Fused")
        found = gradients(mine, X, edges)
    expected = gradients(exact, X.to(next(exact.parameters()).dtype), theirs)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert difference(value, found[name]) <= (1e-5 if name == "eps" else 2e-6), name


@pytest.mark.parametrize("name", FEW)
def test_the_same_as_pytorch_geometric_in_float(name):
    check_same(LAYERS[name], "int64")


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_for_every_form_of_edges(name, graph):
    check_same(KINDS[name], graph)


@pytest.mark.thorough
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_for_all_options_and_edges(name, graph):
    check_same(LAYERS[name], graph)


@pytest.mark.parametrize("name", KINDS)
def test_an_adjacency_is_taken_as_edges(name):
    _, mine = both(KINDS[name])
    loopless = EDGES[:, EDGES[0] != EDGES[1]]
    expected = gradients(mine, X, loopless)
    for key, value in gradients(mine, X, Adjacency.from_edges(loopless, NODES)).items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("quant", [FLOAT, INT8], ids=["float", "int8"])
def test_one_node_and_nodes_that_need_no_gradient(quant):
    for make in KINDS.values():
        model, mine = both(make, quant)
        for edges in (EDGES[:, :0], torch.zeros(2, 1, dtype=torch.int64)):
            y = mine(X[:1], edges)
            y.sum().backward()
            assert decibels(model(X[:1], edges), y.detach()) > 25
        assert all(one.grad is not None for one in mine.parameters() if one.requires_grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    for make in KINDS.values():
        model, mine = (one.to(dtype) for one in both(make))
        found = gradients(mine, X.to(dtype), EDGES)
        assert found["y"].dtype == found["x"].dtype == dtype
        expected = gradients(model.float(), X, EDGES)
        expected.pop("eps", None)  # a sum of values of both signs
        for name, value in expected.items():
            assert decibels(value, found[name].float()) > 20, name


def test_autocast():
    for make in KINDS.values():
        model, mine = both(make)
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = model(X, EDGES), mine(X, EDGES)
        assert decibels(expected.float(), found.float()) > 30


@pytest.mark.parametrize("quant", [FLOAT, INT8], ids=["float", "int8"])
@pytest.mark.parametrize("name", KINDS)
def test_training_after_a_pass_of_inference_on_the_same_graph(name, quant):
    _, mine = both(KINDS[name], quant)
    edges, x = EDGES.clone(), X.clone().requires_grad_()
    mine.eval()
    with torch.inference_mode():
        expected, inside = mine(X, edges), EDGES.clone()
        assert torch.equal(mine(X, inside), expected)
        inside[:, :20] = 1
        assert not torch.equal(mine(X, inside), expected)
    for one in (edges, inside):
        mine.train()(x, one).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_other_defaults_change_nothing(name):
    found = []
    for defaults in (nullcontext, other_defaults):
        _, mine = both(KINDS[name], INT8)
        set_node_bits(mine, {0: 8, 4: 4})
        x, edges = X.clone().requires_grad_(), EDGES.clone()
        with defaults():
            mine(x, edges).square().sum().backward()
        found.append((x.grad, mine.eval()(X, edges)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("graph", ["csr", "coo"])
def test_a_sparse_graph_is_made_in_inference(graph):
    model, mine = both(KINDS["GCN"])
    with torch.inference_mode():
        edges = GRAPHS[graph].clone()
        assert difference(model(X, edges), mine(X, edges)) <= 2e-6
    assert gradients(mine, X, edges)["x"].isfinite().all()


def read_graphs(monkeypatch) -> list[int]:
    """A list that grows with every graph that is sorted."""
    seen, own = [], Adjacency.from_edges.__func__
    count = classmethod(lambda cls, *given: (seen.append(1), own(cls, *given))[1])
    monkeypatch.setattr(Adjacency, "from_edges", count)
    return seen


def test_layers_share_a_graph_until_it_changes(monkeypatch):
    _recent.set(None)
    first, second = GCNConv(WIDTH, 16), GCNConv(16, 8)
    lsq.convert(nn.ModuleList([first, second]), FLOAT)
    seen, edges = read_graphs(monkeypatch), EDGES.clone()
    with torch.no_grad():
        before = [second(first(X, edges), edges) for _ in range(3)][0]
        assert len(seen) == 1
        edges[0, 0] += 1
        assert not torch.equal(second(first(X, edges), edges), before)
        assert len(seen) == 2


@pytest.mark.parametrize(
    "make, write",
    [
        (torch.clone, lambda edges: edges.add_(1)),
        (torch.clone, lambda edges: edges.data.add_(1)),
        (torch.clone, lambda edges: edges.numpy().__iadd__(1)),
        (geometric.EdgeIndex, lambda edges: edges.as_tensor().add_(1)),
    ],
    ids=["in place", "data", "numpy", "EdgeIndex"],
)
def test_edges_that_are_written_are_read_anew(make, write):
    model, mine = both(KINDS["GCN"])
    edges = make(EDGES.clone())
    before = mine(X, edges)
    write(edges)
    expected = model(X, EDGES + 1)
    assert difference(expected, mine(X, edges)) <= 2e-6 < difference(expected, before)


def test_weights_of_edges_that_are_trained_have_gradients():
    model, mine = both(KINDS["GraphConv"])
    found = []
    for one in (model, mine):
        weights = torch.ones(UNIQUE.shape[1], requires_grad=True)
        edges = torch.sparse_coo_tensor(UNIQUE.flip(0), weights, (NODES, NODES)).coalesce()
        one(X, edges).square().sum().backward()
        found.append(weights.grad)
    assert torch.equal(*found)


# In int8


@pytest.mark.parametrize("backward", ["int8", "float"])
@pytest.mark.parametrize("name", KINDS)
def test_int8_is_near_float(name, backward):
    model, mine = both(KINDS[name], lsq.QuantConfig(backward=backward))
    gradients(mine, X, EDGES)
    found = gradients(mine, X, EDGES)
    for key, value in gradients(model, X, EDGES).items():
        assert decibels(value, found[key]) > (28 if key == "y" else 5), key


def signal(quant: lsq.QuantConfig, name: str = "GraphConv") -> float:
    model, mine = both(KINDS[name], quant)
    mine(X, EDGES).sum().backward()
    return decibels(model(X, EDGES), mine.eval()(X, EDGES).detach())


@pytest.mark.thorough
def test_fewer_bits_say_less():
    found = [signal(lsq.QuantConfig(bits=bits)) for bits in range(8, 1, -1)]
    assert found == sorted(found, reverse=True) and found[0] > 30 and found[4] > 12


@pytest.mark.parametrize(
    "options",
    [
        {"weight_format": "int4"},
        {"weight_format": "int4/group64"},
        {"weight_format": "int8/row"},
        {"activation_format": "mxfp4"},
        {"gradient_format": "mxfp4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", first(["GraphSAGE", "GCNConv"], 1))
def test_number_formats(name, options):
    assert signal(lsq.QuantConfig(**options), name) > 10


def test_patterns_name_weights_and_activations_by_their_paths():
    pattern = "int8, convs.1.lin.weight=int4/row"
    _, mine = both(KINDS["GCN"], lsq.QuantConfig(weight_format=pattern))
    assert [len(mine.get_parameter(f"convs_{one}_lin_weight_clip")) for one in range(3)]
    assert "convs.1.lin.weight=int4/row" in mine.quant.weight_format
    assert signal(lsq.QuantConfig(activation_format="int8, convs_1_input=mxfp4"), "GCN") > 10
    with pytest.raises(ValueError, match="'convs.9.lin.weight', but no tensor of this model"):
        both(KINDS["GCN"], lsq.QuantConfig(weight_format="int8, convs.9.lin.weight=int4/row"))
    inside = nn.ModuleDict({"a": GCNConv(WIDTH, 19), "b": SAGEConv(19, 7)})
    lsq.convert(inside, lsq.QuantConfig(weight_format="int8, b.lin_l.weight=int4/row"))
    assert (inside["a"].quant.weight_format, inside["b"].quant.weight_format) == (
        "int8",
        "int8,lin_l.weight=int4/row",
    )


@pytest.mark.parametrize("options", [{}, {"clips": "learned"}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("make", first([GCN, GraphSAGE], 1), ids=["GCN", "GraphSAGE"])
def test_training_in_int8_ends_near_float(make, options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, WIDTH, generator=generator)
    labels = x[:, :4].argmax(1)
    edges = torch.randint(150, (2, 1500), generator=generator)
    edges = edges[:, labels[edges[0]] == labels[edges[1]]]
    ends = []
    for quant in (None, lsq.QuantConfig(**options)):
        torch.manual_seed(0)
        model = make(WIDTH, 32, 2, 4, dropout=0.2)
        if quant is not None:
            lsq.convert(model, quant)
        clips = {name: one.clone() for name, one in model.named_parameters() if "_clip" in name}
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x, edges), labels)
            loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert ends[0] < 0.1 and ends[1] < 0.15
    moved = [not torch.equal(model.get_parameter(name), one) for name, one in clips.items()]
    assert all(moved) and len(moved) >= 6


def test_dropout_keeps_the_mean_and_is_off_in_evaluation():
    model, mine = both(lambda: GCN(WIDTH, 48, 2, 7, dropout=0.4))
    with torch.no_grad():
        mean = torch.stack([mine(X, EDGES) for _ in range(400)]).mean(0)
        torch.testing.assert_close(mean, model.eval()(X, EDGES), rtol=0.2, atol=0.25)
        torch.testing.assert_close(mine.eval()(X, EDGES), model(X, EDGES))


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_state_dicts(name):
    model, mine = both(KINDS[name], INT8)
    mine(X, EDGES).sum().backward()
    expected, file = mine.eval()(X, EDGES), io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    for one in (
        copy.deepcopy(mine),
        pickle.loads(pickle.dumps(mine)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(one(X, EDGES), expected)
        weights = torch.rand(UNIQUE.shape[1])
        with pytest.warns(UserWarning, match="runs its own code"):
            one(X, sparse(UNIQUE, weights))
    other = both(KINDS[name], INT8)[1]
    other.load_state_dict(mine.state_dict())
    assert torch.equal(other.eval()(X, EDGES), expected)
    other.load_state_dict(model.state_dict())  # without clips
    assert lsq.revert(mine) is mine and type(mine) is type(model)
    assert vars(mine).keys() == vars(model).keys()
    for (name, value), (other, found) in zip(
        model.state_dict().items(), mine.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(value, found)
    assert torch.equal(mine(X, EDGES), model.eval()(X, EDGES))
    lsq.convert(mine)


def test_state_dicts_of_its_linear_layers():
    mine, other = layers = geometric.nn.Linear(64, 64), geometric.nn.Linear(64, 64)
    for layer in layers:
        lsq.convert(layer)
    x = torch.randn(9, 64)
    mine(x).sum().backward()
    other.load_state_dict(mine.state_dict())
    assert torch.equal(other(x / 2), mine(x / 2))  # clips are those of x


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "GCN", "GraphSAGE"])
def test_frozen_weights(name):
    _, mine = both(lambda: KINDS[name]().requires_grad_(False), INT8)
    with torch.no_grad():
        mine(X, EDGES)
        expected, file = mine.eval()(X, EDGES), io.BytesIO()
        lsq.freeze(mine)
        assert torch.equal(mine(X, EDGES), expected)
        assert torch.equal(copy.deepcopy(mine)(X, EDGES), expected)
        with pytest.warns(UserWarning, match="runs its own code"):
            own = mine(X, sparse(UNIQUE, torch.full((UNIQUE.shape[1],), 1.00001)))
        assert decibels(mine(X, sparse(UNIQUE)), own) > 20
        torch.save(mine.state_dict(), file)
        assert decibels(expected, lsq.revert(mine)(X, EDGES)) > 30


def test_observers():
    model, mine = both(KINDS["GCN"], INT8)
    with observe(mine) as found:
        mine(X, EDGES).sum().backward()
    assert {"convs.0.lin.weight", "convs.2.input", "convs.1.neighbours"} <= found.keys()
    monitor = lsq.monitor(mine, every=1)
    mine(X, EDGES).sum().backward()
    assert "0 of 1 modules go on in floats" in str(monitor)
    costs = sensitivity(model, lambda one, x: (one(x, EDGES).square().sum(), len(x)), [X])
    assert "convs.1.lin.weight" in str(costs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    for make in (KINDS["GCN"], KINDS["GINConv"]):
        _, mine = both(make)

        def again(x, edges, mine=mine):
            return checkpoint(mine, x, edges, use_reentrant=reentrant)

        found, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
        again(found, EDGES).square().sum().backward()
        mine(expected, EDGES).square().sum().backward()
        torch.testing.assert_close(found.grad, expected.grad)


def test_beside_a_compiled_graph():
    model, mine = both(lambda: nn.ModuleList([GCNConv(WIDTH, 16), nn.Linear(16, 5)]))

    def run(layers, x):
        return layers[1](layers[0](x, EDGES).relu())

    compiled = torch.compile(lambda x: run(mine, x), backend="eager")
    torch.testing.assert_close(compiled(X), run(model, X))


def test_planned_memory_takes_smaller_graphs_and_refuses_larger_ones():
    for name in ("GraphConv", "GCN"):
        _, mine = both(KINDS[name], INT8)
        mine(X, EDGES).sum().backward()
        plain = copy.deepcopy(mine)
        plan_memory(mine, lambda mine=mine: mine(X, EDGES).square().mean())
        for count in (NODES, 12, 17, NODES):
            edges = EDGES[:, (EDGES < count).all(0)]
            for one in (plain, mine):
                torch.manual_seed(count)
                one.zero_grad()
                one(X[:count], edges).square().mean().backward()
            for (_, value), (name, found) in zip(
                plain.named_parameters(), mine.named_parameters(), strict=True
            ):
                assert (value.grad is None) is (found.grad is None), name
                assert value.grad is None or torch.equal(value.grad, found.grad), name
        with pytest.raises(ValueError, match="the batch is too large for the planned memory"):
            mine(torch.randn(100, WIDTH), EDGES).square().mean().backward()


def test_a_layer_used_twice_and_a_weight_of_two_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GCNConv(WIDTH, WIDTH)

        def forward(self, x, edges):
            return self.layer(self.layer(x, edges).relu(), edges)

    def tied():
        model = GCN(WIDTH, 32, 3, 32)
        model.convs[2].lin.weight = model.convs[1].lin.weight
        return model

    def shared():
        model = GCN(WIDTH, 32, 4, 32)
        model.convs[2] = model.convs[1]
        return model

    for make in (Twice, tied, shared):
        check_same(make, "int64")


# Passes that programs do not fit


def calls(name: str) -> dict[str, tuple]:
    found = {"weighted CSR": (X, sparse(UNIQUE, torch.rand(UNIQUE.shape[1])))}
    if name in ("GCNConv", "GraphConv", "GCN"):
        found["weights"] = (X, EDGES, torch.rand(EDGES.shape[1]))
    if name in ("SAGEConv", "GINConv", "GraphConv"):
        found["two kinds of nodes"] = ((X, X[:5]), EDGES[:, EDGES[1] < 5])
    if name in ("GCN", "GraphSAGE"):
        found["graphs of a batch"] = (X, EDGES, None, None, torch.zeros(NODES))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_passes_of_more_than_nodes_and_edges_run_in_floats(name):
    model, mine = both(KINDS[name], INT8)
    for given in calls(name).values():
        model.zero_grad(), mine.zero_grad()
        with pytest.warns(UserWarning, match="runs its own code in floats") as said:
            found = mine(*given)
            mine(*given)
        assert len([one for one in said if "own code" in str(one.message)]) == 1
        expected = model(*given)
        assert torch.equal(found, expected)
        for one in (found, expected):
            one.square().sum().backward()
        for path, parameter in model.named_parameters():
            torch.testing.assert_close(mine.get_parameter(path).grad, parameter.grad)
        mine.departed = frozenset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a Fused")
        mine(X, EDGES)


def doubled(module, given, result):
    return 2 * result


CHANGES = {
    "another linear layer": (
        "GCNConv",
        lambda layer: setattr(layer, "lin", nn.Linear(WIDTH, 19)),
    ),
    "loops": ("GCNConv", lambda layer: setattr(layer, "add_self_loops", False)),
    "no bias": ("GCNConv", lambda layer: setattr(layer, "bias", None)),
    "a message": (
        "GCNConv",
        lambda layer: setattr(layer, "message", lambda x_j, edge_weight: 2 * x_j),
    ),
    "the direction": ("SAGEConv", lambda layer: setattr(layer, "flow", "target_to_source")),
    "own weights of a layer": ("GCN", lambda model: setattr(model.convs[1], "improved", True)),
    "no own row": ("SAGEConv", lambda layer: setattr(layer, "root_weight", False)),
    "sums": ("SAGEConv", lambda layer: setattr(layer, "aggr_module", SumAggregation())),
    "an activation": ("GCN", lambda model: setattr(model, "act", nn.GELU())),
    "no activation": ("GCN", lambda model: setattr(model, "act", None)),
    "a norm": ("GCN", lambda model: model.norms.__setitem__(0, nn.LayerNorm(32))),
    "loops of a layer": ("GCN", lambda model: setattr(model.convs[1], "add_self_loops", False)),
    "a layer": (
        "GCN",
        lambda model: setattr(model.convs[1], "lin", nn.Linear(32, 32, bias=False)),
    ),
    "all dropped": ("GCN", lambda model: setattr(model.dropout, "p", 1.0)),
    "dropout in evaluation": (
        "GCN",
        lambda model: (setattr(model.dropout, "p", 0.5), model.dropout.eval()),
    ),
    "a hook": ("GCN", lambda model: model.convs[1].lin.register_forward_hook(doubled)),
    "a hook of messages": (
        "GraphSAGE",
        lambda model: model.convs[1].register_message_forward_hook(doubled),
    ),
    "a parametrization": ("GCNConv", lambda layer: parametrizations.weight_norm(layer.lin)),
    "pruning": (
        "GCN",
        lambda model: prune.l1_unstructured(model.convs[1].lin, "weight", 0.5),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_conversion_is_seen(change):
    name, apply = CHANGES[change]
    model, mine = both(KINDS[name])
    mine(X, EDGES)
    for one in (model, mine):
        torch.manual_seed(5)
        apply(one)
    with pytest.warns(UserWarning, match="runs its own code in floats"):
        found = mine(X, EDGES)
    assert torch.equal(found, model(X, EDGES))


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_before_the_conversion_is_seen(change):
    name, apply = CHANGES[change]
    model, mine = KINDS[name](), KINDS[name]()
    mine.load_state_dict(model.state_dict())
    for one in (model, mine):
        torch.manual_seed(5)
        apply(one)
    try:
        lsq.convert(mine, FLOAT)
    except ValueError as error:
        assert "no linear layer to convert" in str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(mine(X, EDGES), model(X, EDGES))


@pytest.mark.parametrize("converted_first", [True, False])
def test_a_layer_may_count_its_own_nodes_twice(converted_first):
    model = KINDS["GCN"]()
    mine = copy.deepcopy(model)
    if converted_first:
        lsq.convert(mine, FLOAT)
    model.convs[1].improved = mine.convs[1].improved = True
    if not converted_first:
        assert lsq.convert(mine, FLOAT).fused == ("convs.0", "convs.1", "convs.2")
    torch.testing.assert_close(mine(X, GRAPHS["csr"]), model(X, GRAPHS["csr"]))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.convs.__setitem__(1, GCNConv(32, 32)),
        lambda model: model.convs[0].requires_grad_(False),
    ],
)
def test_changes_that_programs_follow(change):
    model, mine = both(KINDS["GCN"])
    mine(X, EDGES)
    for one in (model, mine):
        torch.manual_seed(5)
        change(one)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a Fused")
        found = gradients(mine, X, EDGES)
    for key, value in gradients(model, X, EDGES).items():
        assert (value is None) is (found[key] is None)
        assert value is None or difference(value, found[key]) <= 2e-6


def test_an_explained_model_runs_its_program_again_afterwards():
    model, mine = both(KINDS["GCN"], INT8)
    masks = []
    for one in (model, mine):
        torch.manual_seed(0)
        explainer = Explainer(
            one.eval(),
            GNNExplainer(epochs=2),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        masks.append(explainer(X, EDGES, index=3).edge_mask)
    assert torch.equal(*masks)
    assert mine.departed == {"it is explained, or has hooks on its messages"}
    mine.departed = frozenset()
    mine(X, EDGES)
    assert not mine.departed


# Mistakes


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "GCN", "GraphSAGE"])
def test_nodes_of_another_width_are_refused(name):
    _, mine = both(KINDS[name], INT8)
    for width in (WIDTH - 1, WIDTH + 1, WIDTH + 7):
        with pytest.raises(ValueError, match=f"have {width} columns, but this layer takes {WIDTH}"):
            mine(torch.randn(NODES, width), EDGES)


def test_a_replaced_layer_of_another_width_is_refused():
    _, mine = both(KINDS["GCN"])
    mine.convs[1] = GCNConv(40, 32)
    with pytest.raises(ValueError, match=r"convs.1.lin.weight of this .* is \[32, 40\]"):
        mine(X, EDGES)


WRONG = {
    "an index too large": (X, torch.tensor([[0, 30], [1, 2]]), r"edge 1 has the nodes \[30, 2\]"),
    "a negative index": (X, torch.tensor([[0, -1], [1, 2]]), r"edge 1 has the nodes \[-1, 2\]"),
    "too few rows": (X[:20], sparse(UNIQUE), "has 23 nodes, but there are 20 rows"),
    "an adjacency": (X[:20], Adjacency.from_edges(EDGES, NODES), "23 nodes, but there are 20 rows"),
    "an index too large in an adjacency": (
        X,
        Adjacency(indptr=torch.arange(NODES + 1).int(), indices=torch.full((NODES,), 40).int()),
        r"edge 0 has the nodes \[40\], but the graph has 23 nodes",
    ),
    "no square": (
        X,
        torch.sparse_csr_tensor(
            torch.zeros(NODES + 1, dtype=torch.int64),
            EDGES[0, :0],
            torch.zeros(0),
            (NODES, 40),
        ),
        "has 40 nodes, but there are 23 rows",
    ),
    "sizes of EdgeIndex": (
        X,
        geometric.EdgeIndex(EDGES, sparse_size=(40, 40)),
        "has 40 nodes, but there are 23 rows",
    ),
    "floats": (X, EDGES.float(), r"edges are torch.float32 \[2, ..\]; give whole numbers"),
    "three rows": (X, EDGES[[0, 1, 1]], r"edges are torch.int64 \[3, 83\]"),
    "devices": (X, EDGES.to("meta"), "the edges are on meta, but the nodes are on cpu; move"),
    "devices of nodes": (X.to("meta"), EDGES.to("meta"), "is on meta, but the parameters"),
    "float64": (X.double(), EDGES, "x is torch.float64"),
}


@pytest.mark.parametrize("what", [one for one in WRONG if one != "devices of nodes"])
def test_mistakes_are_named(what):
    x, edges, message = WRONG[what]
    for name in ("SAGEConv", "GCN"):
        _, mine = both(KINDS[name])
        with pytest.raises(ValueError, match=message):
            mine(x, edges)


def test_no_nodes_and_sparse_nodes_run_its_own_code():
    for make in KINDS.values():
        model, mine = both(make)
        with pytest.warns(UserWarning, match="no dense tensor .* of floats, or there are none"):
            assert torch.equal(mine(X[:0], EDGES[:, :0]), model(X[:0], EDGES[:, :0]))
    model, mine = both(KINDS["GCNConv"])
    with pytest.warns(UserWarning, match="no dense tensor"):
        assert torch.equal(mine(X.to_sparse(), EDGES), model(X.to_sparse(), EDGES))


# What is converted


class Own(GCNConv):
    """A layer of a user."""


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: SAGEConv(64, 64, aggr="max"), "its aggr is 'max'; a program has mean, sum, add"),
        (lambda: SAGEConv(64, 64, project=True), "it projects before it aggregates"),
        (lambda: GCNConv(64, 64, flow="target_to_source"), "its flow, node_dim"),
        (lambda: GCN(64, 64, 2, norm="layer_norm"), "it has norms or jumping knowledge"),
        (lambda: GCN(64, 64, 2, jk="cat"), "it has norms or jumping knowledge"),
        (lambda: GCN(64, 64, 2, act="elu"), "its activation is ELU; there are relu, gelu"),
        (lambda: GATConv(64, 64), "programs exist for GCN, GraphSAGE, GCNConv, SAGEConv"),
        (lambda: Own(64, 64), "programs exist for GCN, GraphSAGE, GCNConv, SAGEConv"),
    ],
)
def test_reasons_to_leave_a_layer(make, reason):
    model = nn.Sequential(make())
    expected, x = copy.deepcopy(model), torch.randn(NODES, 64)
    report = lsq.convert(model)
    assert report.whole[0].name == "0" and reason in report.whole[0].reason
    assert f"not fused: {report.whole[0].reason}" in str(report)
    assert decibels(expected[0](x, EDGES), model[0](x, EDGES).detach()) > 25


def test_layers_of_two_widths_stay_floats():
    model = SAGEConv((64, 128), 64)
    report = lsq.convert(model)
    assert report.whole[0].reason == (
        "its weights are lin_l.weight [64, 64] and lin_r.weight [64, 128]"
    )
    nodes = torch.randn(NODES, 64), torch.randn(5, 128)
    assert model(nodes, EDGES[:, EDGES[1] < 5]).shape == (5, 64)


def test_layers_of_models_that_are_not_fused_are():
    model = GCN(64, 64, 2, 7, norm="batch_norm")
    assert lsq.convert(model).fused == ("convs.0", "convs.1")


def test_lazy_layers_are_left_until_they_have_sizes():
    model = nn.ModuleList([GCNConv(-1, 64), GCNConv(64, 64)])
    report = lsq.convert(model)
    assert report.fused == ("1",) and "UninitializedParameter" in report.left["0.lin"]


def test_skip():
    model = nn.ModuleDict({"a": gin(), "b": GCN(WIDTH, 32, 2), "c": GCNConv(WIDTH, 19)})
    for skip, fused in {
        ("a",): ("b", "c"),
        ("b.convs.0",): ("a", "b.convs.1", "c"),
        ("a.nn", "c"): ("a", "b"),
    }.items():
        assert lsq.convert(copy.deepcopy(model), skip=skip).fused == fused


def test_conversion_on_the_meta_device():
    with torch.device("meta"):
        mine = KINDS["GCN"]()
    lsq.convert(mine)
    model = KINDS["GCN"]()
    mine.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert decibels(model(X, EDGES), mine(X, EDGES).detach()) > 20


def test_freezing_before_any_pass():
    model = GCN(WIDTH, 20, 3, 7).requires_grad_(False)
    mine = copy.deepcopy(model)
    lsq.convert(mine)
    lsq.freeze(mine)
    assert decibels(model(X, EDGES), mine(X, EDGES)) > 20


def test_sparsity_is_not_ignored():
    model = nn.ModuleList([GCNConv(64, 64), nn.Linear(64, 64)])
    report = lsq.convert(model, lsq.QuantConfig(sparsity="2:4"))
    assert not report.fused and len(report.converted) == 2
    assert "weights of graph layers are not pruned" in str(report)
    with pytest.raises(ValueError, match="its layers of lsq stay dense: .* graph layers"):
        sparsify(both(KINDS["GCN"], INT8)[1])


def test_nothing_to_convert():
    with pytest.raises(ValueError, match="has no linear layer to convert"):
        lsq.convert(nn.Sequential(GATConv(13, 19)), INT8)
