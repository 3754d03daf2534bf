"""Programs of graph layers: a product of each node's row, then sums over its neighbours.

Sums follow the product, in either order the same values: a layer sums its outputs, which are
rounded once under a clip of their own. M nodes, E edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

import torch

from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.layers.builder import Epilogue, LayerBuilder, Mode, Result, cached
from lsq.ops.aggregate import Aggregate, Edges
from lsq.ops.coarsen import CoarsenRows
from lsq.ops.nonlinearity import Activation
from lsq.program.program import Program
from lsq.program.tensor import Kind, VirtualTensor, fan_in
from lsq.program.values import Rows


@dataclass(frozen=True, kw_only=True)
class GraphLayer:
    """One layer: sums over neighbours of x weight^T, plus x root^T, bias and epilogue."""

    prefix: str = ""
    """Begins the names of the layer's clips."""
    inputs: int
    outputs: int
    columns: int
    """Columns of the result: `outputs`, or more where codes are padded."""
    weight: str | None
    """Name of the neighbours' weight [outputs, inputs]; None: x itself is summed."""
    root: str | None = None
    """Name of the weight [outputs, inputs] of a node's own row."""
    bias: str | None = None
    own: bool = False
    """Whether a node is its own neighbour, as often as the input `own` says."""
    factor: bool = False
    """Whether sums are multiplied by the input `factor` [M]."""
    scaled: bool = False
    """Whether rows are multiplied by `factor` before they are summed, too, as in GCN."""
    activation: str = "none"
    """Name of an Activation."""
    dropout: float = 0.0


@lru_cache
def filled(layers: tuple[GraphLayer, ...], coded: bool, multiple: int) -> tuple[GraphLayer, ...]:
    """Pad the widths of layers, if they multiply codes: results to DIMENSION_MULTIPLE, nodes to
    `multiple`. In floats only nodes may be padded already."""
    nodes, results = (multiple, DIMENSION_MULTIPLE) if coded else (1, 1)
    found, inputs = [], _padded(layers[0].inputs, nodes)
    for layer in layers:
        columns = inputs if layer.weight is None else _padded(layer.outputs, results)
        found.append(replace(layer, inputs=inputs, columns=columns))
        inputs = columns
    return tuple(found)


@lru_cache
def widths(layers: tuple[GraphLayer, ...]) -> dict[str, int]:
    """Return the last dimension of each weight and bias, by name."""
    found = {}
    for layer in layers:
        found |= {layer.weight: layer.inputs, layer.root: layer.inputs, layer.bias: layer.columns}
    return {name: width for name, width in found.items() if name is not None}


def _padded(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


@cached
def graph_layers(
    quant: QuantConfig,
    nodes: int,
    edges: int,
    layers: Sequence[GraphLayer],
    mode: Mode,
    coarsens: bool = False,
) -> Program:
    """Build x [M, K] -> y [M, N], layer after layer on one graph.

    `coarsens`: the codes of a node have the width that the input `unit` [M] says.
    """
    b, layers = mode.builder("graph", quant), filled(tuple(layers), quant.coded, 1)
    given = _Graph.declared(b, nodes, edges, layers, coarsens)
    first = layers[0]
    x = b.input("x", (nodes, first.inputs))
    rows = b.round(x, first.prefix + "input_clip")
    given.coarsen(b, rows)
    for layer, following in zip_longest(layers, layers[1:]):
        y = _layer(b, given, rows, layer, following)
        rows = y.rows
        given.coarsen(b, rows)
    b.output(y.out)
    return b.build()


@dataclass(frozen=True, kw_only=True)
class _Graph:
    edges: Edges
    reversed_edges: Edges | None
    own: VirtualTensor | None
    factor: VirtualTensor | None
    unit: VirtualTensor | None

    @classmethod
    def declared(
        cls,
        b: LayerBuilder,
        nodes: int,
        edges: int,
        layers: Sequence[GraphLayer],
        coarsens: bool,
    ) -> "_Graph":
        def given(prefix: str) -> Edges:
            return Edges(
                indptr=b.input(prefix + "indptr", (nodes + 1,), torch.int32),
                indices=b.input(prefix + "indices", (edges,), torch.int32),
            )

        return cls(
            edges=given(""),
            reversed_edges=given("reversed_") if b.backward else None,
            own=b.input("own", (1,)) if any(one.own for one in layers) else None,
            factor=b.input("factor", (nodes,)) if any(one.factor for one in layers) else None,
            unit=b.input("unit", (nodes,), torch.int8) if coarsens else None,
        )

    def coarsen(self, b: LayerBuilder, x: Rows) -> None:
        """Coarsen codes in place where nodes have widths of their own."""
        if self.unit is not None and x.coded is not None:
            codes, largest = x.coded.codes, x.coded.format.largest
            b.add(CoarsenRows(codes=codes, unit=self.unit, coarse=codes, largest=largest))


def _layer(
    b: LayerBuilder, given: _Graph, x: Rows, layer: GraphLayer, following: GraphLayer | None
) -> Result:
    shape, prefix = (layer.outputs, layer.inputs), layer.prefix
    bound, size = fan_in(layer.inputs), (x.tensor.shape[0], layer.columns)
    options = {"bound": bound, "rows": layer.columns if b.quant.coded else None}
    root = None
    if layer.root is not None:
        root = b.project(x, layer.root, shape, Epilogue(name=prefix + "root"), **options).floats
    if layer.weight is not None:
        end = Epilogue(
            name=prefix + "neighbours",
            clip=prefix + "neighbours_clip",
            row_factor=given.factor if layer.scaled else None,
        )
        accumulates = root is not None
        x = b.project(x, layer.weight, shape, end, accumulates=accumulates, **options)
        given.coarsen(b, x)
    bias = layer.bias and b.parameter(layer.bias, size[1:], Kind.BIAS, bound=bound)
    y = b.result(prefix + "y", size, following and following.prefix + "input_clip")
    b.add(
        Aggregate(
            edges=given.edges,
            reversed_edges=given.reversed_edges,
            x=x,
            own=given.own if layer.own else None,
            factor=given.factor if layer.factor else None,
            root=root,
            bias=bias,
            nonlinearity=b.nonlinearity(
                prefix + "y", size, Activation[layer.activation], layer.dropout
            ),
            out=y.out,
            rounded=y.rounded,
        )
    )
    return y
