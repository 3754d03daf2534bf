"""Aggregate against sums over sparse matrices of scipy in int64 and float64; kernels against the
reference."""

import numpy as np
import pytest
import scipy.sparse
import torch

from lsq.graphs.adjacency import Adjacency
from lsq.ops.aggregate import Aggregate, AggregateGradient, Edges
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.program.values import Rows
from tests.ops.compare import (
    by_row,
    compare,
    dropout_of,
    empty,
    gradient_to_round,
    on_cpu,
    on_reference,
    refused,
    rounded,
    to_round,
)
from tests.ops.cuda import DTYPES, compare_cuda, run

SHAPES = [(1, 8), (17, 16), (41, 48), (70, 136), (45, 296), (33, 3)]
"""Nodes and columns: whole blocks of columns, parts of them, and single columns."""
CUDA_SHAPES = [(41, 48), (11, 1040), (70, 136)]
"""Nodes and columns: rows in part of a warp and in four warps, two vectors of columns."""
CLIP = 1.6


def graph(nodes: int, edges: int = 0, *, seed: int = 3) -> Adjacency:
    """A directed graph with isolated nodes, self loops, repeated edges and one node that half of
    the edges lead to."""
    draw = torch.Generator().manual_seed(seed)
    edges = edges or 7 * nodes
    pairs = torch.randint(0, max(1, nodes - nodes // 4), (2, edges), generator=draw)
    pairs[1, : edges // 2] = nodes // 2
    pairs[:, -1] = pairs[:, -2]
    pairs[1, -3] = pairs[0, -3]
    return Adjacency.from_edges(pairs, nodes)


def edges_of(adjacency: Adjacency) -> Edges:
    """The edges as an operation reads them, with places behind them that belong to no node."""
    beyond = torch.zeros(3, dtype=torch.int32)
    return Edges(indptr=adjacency.indptr, indices=torch.cat([adjacency.indices, beyond]))


def matrix_of(adjacency: Adjacency, dtype=np.float64):
    """A[target, source], as scipy has it."""
    ones = np.ones(adjacency.edges, dtype)
    shape = adjacency.nodes, adjacency.nodes
    arrays = ones, adjacency.indices.numpy(), adjacency.indptr.numpy()
    return scipy.sparse.csr_matrix(arrays, shape)


def factors(nodes: int) -> torch.Tensor:
    return 0.2 + torch.rand(nodes)


def aggregate(
    adjacency: Adjacency,
    columns: int,
    *,
    codes=True,
    rounds=False,
    own=None,
    factor=False,
    root=False,
    bias=False,
    activation=Activation.none,
    dropout=0.0,
) -> Aggregate:
    nodes = adjacency.nodes
    x = rounded(nodes, columns) if codes else None
    end = None
    if activation is not Activation.none or dropout:
        end = Nonlinearity(activation=activation, dropout=dropout_of(dropout))
        bits = -(-nodes * columns // 8)
        if activation is Activation.relu:
            end.positive = empty(bits, dtype=torch.uint8)
        elif activation.bounded_slope and codes:
            end.slope = empty(nodes, columns, dtype=torch.int8)
        elif activation is not Activation.none:
            end.before = empty(nodes, columns)
    return Aggregate(
        edges=edges_of(adjacency),
        x=Rows(coded=x) if codes else Rows(floats=torch.randn(nodes, columns)),
        own=None if own is None else torch.tensor([own]),
        factor=factors(nodes) if factor else None,
        root=torch.randn(nodes, columns) if root else None,
        bias=torch.randn(columns) if bias else None,
        nonlinearity=end,
        out=empty(nodes, columns),
        rounded=to_round(nodes, columns, CLIP) if rounds else None,
    )


def aggregate_gradient(
    adjacency: Adjacency,
    columns: int,
    *,
    codes=True,
    rounds=False,
    own=None,
    factor=False,
    row_factor=False,
    bias=True,
    error=False,
) -> AggregateGradient:
    nodes = adjacency.nodes
    return AggregateGradient(
        gradient=torch.randn(nodes, columns),
        edges=edges_of(adjacency.transposed),
        own=None if own is None else torch.tensor([own]),
        factor=factors(nodes) if factor else None,
        row_factor=factors(nodes) if row_factor else None,
        x=rounded(nodes, columns, error=error) if codes else None,
        dx=None if rounds else empty(nodes, columns),
        rounded=gradient_to_round(nodes, columns) if rounds else None,
        sum=empty(columns) if bias else None,
        dclip=empty(1) if codes else None,
    )


VARIANTS = [
    {},
    {"own": 1.0},
    {"codes": False, "own": 1.5},
    {"factor": True, "root": True, "bias": True},
    {
        "own": 1.0,
        "factor": True,
        "bias": True,
        "activation": Activation.relu,
        "dropout": 0.3,
        "rounds": True,
    },
    {"bias": True, "activation": Activation.gelu, "rounds": True},
    {"codes": False, "factor": True, "activation": Activation.silu, "dropout": 0.2},
    {"activation": Activation.squared_relu},
]
GRADIENTS = [
    {},
    {"own": 1.0, "factor": True, "row_factor": True},
    {"rounds": True, "own": 1.0, "factor": True, "row_factor": True},
    {"codes": False, "own": 2.0, "bias": False},
    {"rounds": True, "factor": True, "error": True},
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("nodes, columns", SHAPES)
def test_sums_equal_the_reference(nodes, columns, options):
    options = options if columns % 8 == 0 else {**options, "rounds": False}
    compare(aggregate(graph(nodes), columns, **options))


@pytest.mark.parametrize("options", GRADIENTS)
@pytest.mark.parametrize("nodes, columns", SHAPES)
def test_gradients_equal_the_reference(nodes, columns, options):
    compare(aggregate_gradient(graph(nodes), columns, **options))


@pytest.mark.parametrize("run", [on_cpu, on_reference])
@pytest.mark.parametrize("nodes, columns", SHAPES)
def test_sums_of_codes_are_exact(nodes, columns, run):
    adjacency = graph(nodes, 40 * nodes)
    operation = aggregate(adjacency, columns)
    operation.x.coded.scale[0] = 1.0
    expected = matrix_of(adjacency, np.int64) @ operation.x.coded.codes.numpy().astype(np.int64)
    assert np.array_equal(run(operation).out.numpy(), expected)


@pytest.mark.parametrize("code", [127, -127])
def test_sums_of_70_000_equal_codes_are_exact(code, runs):
    indptr = torch.tensor([0, 70_000, 70_000], dtype=torch.int32)
    indices = torch.arange(70_000, dtype=torch.int32) % 2
    operation = aggregate(Adjacency(indptr=indptr, indices=indices), 48)
    operation.x.coded.codes.fill_(code)
    operation.x.coded.scale[0] = 1.0
    for found in runs(operation):
        assert found.out[0].unique().tolist() == [70_000 * code]
        assert found.out[1].unique().tolist() == [0]


def test_all_parts_follow_the_formula():
    nodes, columns = 41, 24
    adjacency = graph(nodes)
    operation = aggregate(adjacency, columns, codes=False, own=1.25, factor=True, bias=True)
    operation.nonlinearity = Nonlinearity(activation=Activation.gelu, before=empty(nodes, columns))
    x, factor = (one.double().numpy() for one in (operation.x.floats, operation.factor))
    z = factor[:, None] * (matrix_of(adjacency) @ x + 1.25 * x) + operation.bias.double().numpy()
    expected = torch.nn.functional.gelu(torch.from_numpy(z)).numpy()
    np.testing.assert_allclose(on_cpu(operation).out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [None, 1.0])
def test_the_gradient_is_the_product_with_the_transposed_matrix(own):
    nodes, columns = 70, 40
    adjacency = graph(nodes)
    operation = aggregate_gradient(
        adjacency, columns, codes=False, own=own, factor=True, row_factor=True
    )
    g, factor, after = (
        one.double().numpy() for one in (operation.gradient, operation.factor, operation.row_factor)
    )
    weighted = g * factor[:, None]
    expected = after[:, None] * (matrix_of(adjacency).T @ weighted + (own or 0.0) * weighted)
    found = on_cpu(operation)
    np.testing.assert_allclose(found.dx, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.sum, g.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_a_bias_alone_needs_no_edges(compared):
    operation = aggregate_gradient(graph(17), 16)
    operation.edges = operation.dx = operation.dclip = None
    compared(operation)


def test_nan_in_a_scale_reaches_every_node(runs):
    operation = aggregate(graph(17), 16, rounds=True)
    operation.x.coded.scale[0] = float("nan")
    for found in runs(operation):
        assert found.out.isnan().all()
        assert found.rounded.scale.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("nodes, columns", CUDA_SHAPES)
def test_sums_on_cuda(nodes, columns, options, dtype):
    compare_cuda(aggregate(graph(nodes), columns, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", GRADIENTS)
@pytest.mark.parametrize("nodes, columns", CUDA_SHAPES)
def test_gradients_on_cuda(nodes, columns, options, dtype):
    """Half of the gradient's edges lead to one node, too."""
    compare_cuda(aggregate_gradient(graph(nodes).transposed, columns, **options), dtype)


def test_codes_alone_are_those_of_the_cpu_on_cuda():
    operation = aggregate(graph(41), 48, own=1.0, factor=True, bias=True, rounds=True)
    operation.out = None
    compare_cuda(operation, exact=True)


@pytest.mark.parametrize("columns", [8, 48])
def test_no_nodes(columns, compared):
    nothing = Adjacency.from_edges(torch.empty(2, 0, dtype=torch.int64), 0)
    found = compared(aggregate(nothing, columns, rounds=True, bias=True))
    assert found.rounded.scale.item() == pytest.approx(CLIP / 127)
    assert not compared(aggregate_gradient(nothing, columns)).sum.any()


def test_columns_that_are_no_multiple_of_8_are_refused_on_cuda():
    with refused("what is summed over neighbours is 12; on CUDA it must be a multiple of 8"):
        run(aggregate(graph(17), 12))
    with refused("gradient summed over neighbours is 12; on CUDA it must be a multiple of 8"):
        run(aggregate_gradient(graph(17), 12))


def test_rows_with_scales_of_their_own_are_refused():
    with refused("cannot be summed over rows"):
        Aggregate(edges=edges_of(graph(17)), x=Rows(coded=by_row(rounded(17, 16))))
