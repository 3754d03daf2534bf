"""Widths of the codes of nodes by their degree, in converted layers of PyTorch Geometric."""

import copy
import io
import re

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCN, GCNConv, GINConv, GraphSAGE, SAGEConv

import lsq
from lsq.config import QuantConfig
from lsq.graphs import Adjacency
from lsq.models import load_clips, save_clips, set_node_bits
from lsq.observe.statistics import observing
from lsq.ops.coarsen import CoarsenRows
from tests.ops.compare import refused
from tests.ops.test_coarsen import coarse_code

NODES, INPUTS, HIDDEN, CLASSES = 60, 20, 24, 5
WIDTHS = {0: 8, 3: 4}


def edges() -> torch.Tensor:
    """Directed, with repeated edges; the last 9 nodes have none."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(NODES - 9, (2, 150), generator=generator)


def degrees() -> torch.Tensor:
    """Without loops, which GCN replaces by its own."""
    sources, targets = edges()
    return targets[sources != targets].bincount(minlength=NODES)


def features() -> torch.Tensor:
    return torch.randn(NODES, INPUTS, generator=torch.Generator().manual_seed(5))


def converted(kind=GCN, node_bits=None, **options) -> nn.Module:
    torch.manual_seed(6)
    layers = {
        GCN: lambda: GCN(INPUTS, HIDDEN, 3, CLASSES),
        GraphSAGE: lambda: GraphSAGE(INPUTS, HIDDEN, 2, CLASSES),
        GINConv: lambda: GINConv(nn.Linear(INPUTS, CLASSES)),
        GCNConv: lambda: GCNConv(INPUTS, CLASSES),
        SAGEConv: lambda: SAGEConv(INPUTS, CLASSES),
    }
    model = nn.ModuleList([layers[kind]()])
    lsq.convert(model, QuantConfig(**options), minimum_width=1)
    set_node_bits(model, node_bits)
    return model


def run(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    return model[0](features() if x is None else x, edges())


class Codes:
    """Codes of passes before and after they are coarsened."""

    def __init__(self):
        self.made, self.read = {}, []

    def __call__(self, declared, operation):
        if declared.rounding() is not None:
            self.made[declared.rounding().codes] = operation.rounding().codes.clone()
        if isinstance(declared, CoarsenRows):
            self.read.append((self.made[declared.codes], operation.coarse.clone()))

    def weights(self, module, tensors):
        pass


def codes_of(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    seen = Codes()
    with observing({model[0]: seen}):
        run(model)
    return seen.read


@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GINConv])
@pytest.mark.parametrize("training", [True, False])
def test_eight_bits_for_all_change_nothing(kind, training):
    results = []
    for bits in (None, {0: 8}):
        model = converted(kind, bits).train(training)
        torch.manual_seed(1)
        y = run(model)
        y.square().sum().backward()
        results.append((y, *(one.grad for one in model.parameters())))
    for plain, same in zip(*results, strict=True):
        assert plain is same or torch.equal(plain, same)


@pytest.mark.parametrize(("kind", "count"), [(GCN, 6), (GraphSAGE, 4), (GINConv, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_codes_of_nodes_of_high_degree_are_coarse(kind, count, training):
    """Inputs of products, hidden activations and what is summed."""
    model = converted(kind, WIDTHS).train(training)
    run(model)
    read = codes_of(model)
    degree = degrees() if kind is GCN else edges()[1].bincount(minlength=NODES)
    high = degree >= 3
    assert len(read) == count and 5 < high.sum() < NODES - 5
    for made, coarse in read:
        made, coarse = made[:NODES], coarse[:NODES]
        assert torch.equal(coarse[~high], made[~high]) and made.any()
        assert not (coarse[high] % 18).any() and coarse[high].abs().max() <= 126
        assert coarse[high].tolist() == [
            [coarse_code(code, 4) for code in row] for row in made[high].tolist()
        ]


def test_a_model_of_four_bits():
    model = converted(GCNConv, {0: 4, 3: 2}, bits=4)
    run(model)
    for made, coarse in codes_of(model):
        high = (degrees() >= 3).tolist()
        wanted = [
            [coarse_code(code, 2 if two else 4, 4) for code in row]
            for row, two in zip(made[:NODES].tolist(), high, strict=True)
        ]
        assert coarse[:NODES].tolist() == wanted and set(
            coarse[:NODES][high].flatten().tolist()
        ) <= {-7, 0, 7}


class Coarse(torch.autograd.Function):
    """Values rounded under a clip, then to multiples of each row's unit; straight-through."""

    @staticmethod
    def forward(ctx, x, clip, bits):
        ctx.save_for_backward(x, clip)
        codes = (x.clamp(-clip, clip) / (clip / 127)).round()
        coarse = [
            [coarse_code(int(code), width) for code in row]
            for row, width in zip(codes.tolist(), bits, strict=True)
        ]
        return torch.tensor(coarse, dtype=x.dtype) * (clip / 127)

    @staticmethod
    def backward(ctx, gradient):
        x, clip = ctx.saved_tensors
        outside = x.abs() > clip
        dclip = torch.where(outside, gradient * x.sign(), 0.0)
        dclip = dclip.sum(1, keepdim=True) if clip.dim() == 2 else dclip.sum().view(1)
        return torch.where(outside, 0.0, gradient), dclip, None


def test_gradients_are_straight_through():
    """Of two GCN layers with ReLU between them, against float64: clipped values get no gradient,
    and their clips all of it."""
    torch.manual_seed(3)
    model = nn.ModuleList([GCN(INPUTS, HIDDEN, 2, CLASSES)])
    lsq.convert(
        model,
        QuantConfig(backward="float", clips="learned", clip_init="absmax"),
        minimum_width=1,
    )
    set_node_bits(model, WIDTHS)
    gcn = model[0]
    gcn(features(), edges())  # measures clips, which only training limits
    gcn.eval()
    with torch.no_grad():
        for conv in gcn.convs:
            conv.bias.normal_(std=0.1)
        shares = (0.7, 0.7, 0.5, 0.2, 0.7, 0.1)  # of the largest values, which shrink by layer
        for clip, share in zip(gcn.clips().values(), shares, strict=True):
            clip.mul_(share)
    x = features().requires_grad_()
    y = gcn(x, edges())
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    (y * upstream).sum().backward()

    known = {
        name: value.detach().double().requires_grad_() for name, value in gcn.named_parameters()
    }
    wide = x.detach().double().requires_grad_()
    sources, targets = edges()[:, edges()[0] != edges()[1]]
    matrix = torch.eye(NODES, dtype=torch.float64)
    matrix.index_put_((targets, sources), torch.ones(()).double(), accumulate=True)
    factor = matrix.sum(1, keepdim=True).rsqrt()
    widths = [4 if degree >= 3 else 8 for degree in degrees().tolist()]
    h = wide
    for number in range(2):
        prefix = f"convs_{number}_"
        weight = known[f"convs.{number}.lin.weight"]
        clip = known[f"{prefix}lin_weight_clip"].view(-1, 1)[: len(weight)]
        rounded = Coarse.apply(weight, clip, [8] * len(weight))
        rows = Coarse.apply(h, known[f"{prefix}input_clip"], widths)
        sums = Coarse.apply(
            factor * (rows @ rounded.t()), known[f"{prefix}neighbours_clip"], widths
        )
        h = factor * (matrix @ sums) + known[f"convs.{number}.bias"]
        h = h if number else h.relu()
    (h * upstream).sum().backward()

    assert torch.allclose(y.double(), h, atol=1e-5)
    found = {name: value.grad for name, value in gcn.named_parameters()} | {"x": x.grad}
    for name, wanted in (
        {name: one.grad for name, one in known.items()} | {"x": wide.grad}
    ).items():
        scale = wanted.abs().max().item()
        assert scale > 0, name
        assert torch.allclose(found[name].double(), wanted, atol=1e-5 * scale), name


@pytest.mark.parametrize("kind", [GCN, GraphSAGE])
def test_training_lowers_the_loss(kind):
    model = converted(kind, {0: 8, 2: 4, 5: 3})
    labels = torch.randint(CLASSES, (NODES,))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(run(model), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_widths_may_change_between_passes():
    model = converted().eval()
    run(model)
    results = {}
    for bits in (None, {0: 8, 3: 2}, {0: 2}, 2, {0: 8, 10**6: 2}, None):
        set_node_bits(model, bits)
        results.setdefault(str(bits), []).append(run(model))
    plain = results["None"][0]
    assert torch.equal(plain, results["None"][1]), "None takes widths away"
    assert torch.equal(results["2"][0], results["{0: 2}"][0])
    assert torch.equal(plain, results["{0: 8, 1000000: 2}"][0])
    assert not torch.equal(plain, results["{0: 8, 3: 2}"][0])


def test_degrees_are_those_of_the_graph_of_the_pass():
    model = converted(GCNConv, {0: 8, 1: 2}).eval()
    run(model)
    none = torch.zeros(2, 0, dtype=torch.int64)
    alone = model[0](features(), none)
    set_node_bits(model, None)
    assert torch.equal(alone, model[0](features(), none))
    both = model[0](features(), Adjacency.from_edges(edges(), NODES).to_torch())
    set_node_bits(model, {0: 8, 1: 2})
    assert not torch.equal(
        both, model[0](features(), Adjacency.from_edges(edges(), NODES).to_torch())
    )


def test_copies_and_pickles_keep_widths():
    model = converted(node_bits=WIDTHS).eval()
    y = run(model)
    assert "node_bits={0: 8, 3: 4})" in repr(model)
    assert "node_bits" not in repr(converted())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other[0].node_bits == WIDTHS
        assert torch.equal(run(other), y)
        set_node_bits(other, None)
        assert model[0].node_bits == WIDTHS
    lsq.revert(model)
    assert "node_bits" not in vars(model[0])


def test_state_dicts(tmp_path):
    first = converted(node_bits={3: 4, 0: 8})
    run(first)
    state = first.state_dict()
    assert "0.node_bits" in state
    same = converted(node_bits=WIDTHS)
    same.load_state_dict(state)
    assert torch.equal(run(same.eval()), run(first.eval()))
    assert "0.node_bits" in state, "the caller's stays"
    half = {name: value.bfloat16() for name, value in state.items()}
    same.load_state_dict(half)

    plain = converted()
    run(plain)
    message = r"the checkpoint \(0\.\*\) was trained with the bits of nodes {0: 8, 3: 4}, but this"
    with refused(
        message + r" model has None; call lsq.models.set_node_bits\(model, {0: 8, 3: 4}\)"
    ):
        plain.load_state_dict(state)
    with refused("bits of nodes None, but this model has {0: 8, 3: 4}"):
        same.load_state_dict(plain.state_dict())
    with refused("bits of nodes {0: 8, 3: 4}, but this model has {0: 2}"):
        converted(node_bits={0: 2}).load_state_dict(state)
    floats = lsq.models.float_state_dict(first)
    assert not any(name.endswith("node_bits") for name in floats)
    same.load_state_dict(floats)
    assert same[0].node_bits == WIDTHS
    for damaged in (torch.ones(3), state["0.node_bits"] + 200, state["0.format"]):
        with refused(r"0\.node_bits holds no widths of nodes \(.*\); load a sound checkpoint"):
            same.load_state_dict(state | {"0.node_bits": damaged})

    save_clips(first, tmp_path)
    load_clips(same, tmp_path)
    with refused("node_bits"):
        load_clips(plain, tmp_path)


def test_what_cannot_be_is_refused():
    model = converted(node_bits=WIDTHS)
    for bits, message in (
        ({4: 8}, r"bits is {4: 8}; its keys are the least degrees of nodes: .* 0 among them"),
        ({}, r"bits is {}; its keys"),
        ({0: 8, -1: 4}, r"bits is {0: 8, -1: 4}; its keys"),
        ({0: 8, 2: 9}, "bits is 9; it must be a whole number from 2 to 8"),
        ({0: 8, 2: 4.0}, "bits is 4.0; it must be a whole number"),
        (1, "bits is 1; it must be"),
    ):
        with refused(message):
            set_node_bits(model, bits)
        assert model[0].node_bits == WIDTHS, "nothing is set"
    with refused(r"no layer of this Linear is a graph layer of lsq; call lsq.convert\(model\)"):
        set_node_bits(nn.Linear(2, 2), WIDTHS)
    with refused("no layer of this GCN is a graph layer"):
        set_node_bits(GCN(4, 4, 1), None)
    for options, message in (
        ({"mode": "float"}, "but 0 does not multiply int8 codes: it has mode='float'"),
        ({"weight_format": "nvfp4"}, "but 0 does not .* mode='int8', weight_format='nvfp4'"),
        ({"bits": 4}, re.escape("bits is {0: 8, 3: 4}, but 0 rounds to 4 bits; give nodes at")),
    ):
        other = converted(**options)
        set_node_bits(other, None)
        with refused(message):
            set_node_bits(other, WIDTHS)
        assert other[0].node_bits is None
