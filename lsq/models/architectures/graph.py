"""Graph layers of PyTorch Geometric, and its models of several such layers.

Weights are padded with zeros to widths that int8 products take, and so are nodes and edges, so that
few programs are built. N nodes, D columns.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lsq.config import QuantConfig
from lsq.graphs.adjacency import Adjacency
from lsq.layers.builder import Mode
from lsq.layers.coded_weight import CodedWeight
from lsq.layers.graph import GraphLayer, filled, graph_layers, widths
from lsq.layers.in_place import InPlace
from lsq.layers.linear import result_dtype
from lsq.layers.model_formats import tensor_names
from lsq.layers.module import ProgramModule, beside_the_graph, held
from lsq.models import node_widths
from lsq.models.batch import remembered
from lsq.models.exact import (
    GEOMETRIC,
    altered,
    module_at,
    named_inside,
    own_methods,
    patched,
    unaltered,
)
from lsq.models.reading import activation_of
from lsq.program.program import Program
from lsq.program.tensor import Parameter
from lsq.run.backends import backend

SUMS = ("sum", "add")
WEIGHTED = "its edges have weights, and sums of codes have none"


class Graph(InPlace):
    """Layers of PyTorch Geometric that run as one program.

    The float code of the class runs, in floats, in passes that the program does not fit: edge
    weights, sources and targets that are different nodes, hooks on inner modules.
    """

    STATE = (
        *ProgramModule.STATE,
        "layers",
        "departed",
        "inside",
        "places",
        "widths",
        "settings",
        "node_bits",
    )
    any_width = True
    pads_rows = True
    node_bits: node_widths.Widths | None = None
    """See lsq.models.set_node_bits."""

    @classmethod
    def layers_of(cls, module: nn.Module) -> tuple[GraphLayer, ...]:
        """Read the layers of a float module; raises ValueError if no program computes them."""
        raise NotImplementedError

    @classmethod
    def check(cls, module: nn.Module) -> None:
        """Raise a ValueError for a module that may compute something else than the program."""
        change = patched(type(module)) or altered(module)
        if change:
            raise ValueError(f"it has {change}")

    @classmethod
    def config_of(cls, module: nn.Module, quant: QuantConfig) -> tuple[GraphLayer, ...]:
        if quant.pruning is not None:
            raise ValueError("weights of graph layers are not pruned, and sparsity asks for that")
        return cls.layers_of(module)

    def take_place(self, quant: QuantConfig, path: str) -> None:
        self.layers, self.departed = self.layers_of(self), frozenset()
        self.inside, self.places, self.widths = [], {}, {}
        trained = any(parameter.requires_grad for parameter in self.parameters())
        self.begin(quant)
        if quant.formats_differ:
            mode = Mode(training=True, backward=False, backend=backend("reference"))
            names = tensor_names(self._smallest(mode), self.state_names)
            self.begin(quant.at(path, *names))
        self.declare(self._smallest, measure=False)
        self.let_clips_learn(trained)
        self.settings = self._settings()

    def _smallest(self, mode: Mode) -> Program:
        return graph_layers(self.quant, 1, 1, self._fit(self.layers, mode), mode)

    # Parameters: those of programs have the paths of the layer's own

    def state_name(self, name: str) -> str:
        return name.replace(".", "_") if name.endswith("_clip") else name

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        return super()._holder(self.state_name(path))

    def take_parameters(self, every: Iterable[Parameter]) -> None:
        super().take_parameters(every)
        self._look_inside()

    def prunable(self) -> list[str]:
        return []

    def _look_inside(self) -> None:
        """Note the inner modules, and which of them hold the parameters of programs."""
        self.inside, self.places = [], {}
        for path, inner in named_inside(self):
            around, _, last = path.rpartition(".")
            self.inside.append((path, module_at(self, around)._modules, last, inner))
        for name in self.declared:
            holder, last = self._holder(name)
            self.places[name] = holder._parameters, last

    def _settings(self) -> list:
        """Return what the program was built from, besides parameters."""
        kinds = [type(inner) for path, _, _, inner in self.inside if self.covers(path)]
        every = (vars(self), *(vars(inner) for _, _, _, inner in self.inside))
        return kinds + [[one.get(name) for name in _SETTINGS] for one in every if "flow" in one]

    def first_parameter(self) -> nn.Parameter:
        for parameters, last in self.places.values():
            return parameters[last]
        return super().first_parameter()

    def sources(self, name: str) -> list[Tensor]:
        parameters, last = self.places[name]
        return [parameters[last]]

    def own_parameter(self, name: str) -> Tensor:
        parameters, last = self.places[name]
        found, width = parameters[last], self.widths.get(name)
        if width is None or found.shape[-1] >= width:
            return found
        found = found.decode() if isinstance(found, CodedWeight) else found
        return functional.pad(found, (0, width - found.shape[-1]))

    def _fit(self, layers: tuple[GraphLayer, ...], mode: Mode) -> tuple[GraphLayer, ...]:
        """Return layers of widths that the next pass takes; own_parameter will pad to them."""
        layers = filled(layers, self.quant.coded, mode.backend.column_multiple)
        self.widths = widths(layers)
        return layers

    # Passes

    def forward(self, x: Tensor, edge_index: object, *arguments, **options) -> Tensor:
        return self._pass(x, edge_index, arguments, options)

    @beside_the_graph
    def _pass(self, x: Tensor, edge_index: object, arguments: Sequence, options: Mapping) -> Tensor:
        reason = self._departure(x, edge_index, (*arguments, *options.values()))
        if reason is None and not self.schedule.float_fallback:
            graph = _edges_of(edge_index, x, loops=self.counts_loops)
            if graph is not None:
                return self.over(x, graph)
            reason = WEIGHTED
        if reason is not None and reason not in self.departed:
            self.departed |= {reason}
            warnings.warn(
                f"a {type(self).__name__} runs its own code in floats, in the place of its program,"
                f" since {reason}",
                stacklevel=3,
            )
        y = self.float_class.forward(self, x, edge_index, *arguments, **options)
        return held(y, self.clips().values())

    def _departure(self, x: object, edge_index: object, others: Sequence) -> str | None:
        """Return the reason to run the layer's own code in this pass, or None."""
        dense = isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point()
        if not dense or x.dim() != 2 or not x.numel():
            return "its nodes are no dense tensor [nodes, columns] of floats, or there are none"
        if any(other is not None for other in others):
            return "it was called with more than nodes and edges, such as weights of edges"
        if not isinstance(edge_index, Adjacency | Tensor):
            return f"its edges are a {type(edge_index).__name__}"
        if any([modules.get(last) is not inner for _, modules, last, inner in self.inside]):
            self._look_inside()
        if self._settings() != self.settings or any(
            [parameters.get(last) is None for parameters, last in self.places.values()]
        ):
            return (
                "it has changed since it was converted; lsq.revert(model) and lsq.convert(model)"
                " look at it anew"
            )
        every = (("", self), *[(path, inner) for path, _, _, inner in self.inside])
        for _, inner in every:
            state = vars(inner)
            if "_propagate_forward_hooks" in state:
                if state["_explain"] or any(_hooks_on_messages(state)):
                    return "it is explained, or has hooks on its messages"
                _forget_explanation(inner)
        own = own_methods(self, self.float_class)
        if own:
            return f"it has {own}"
        covered = [(path, inner) for path, inner in every[1:] if self.covers(path)]
        if unaltered([inner for _, inner in covered]):
            return None
        found = ((path, altered(inner)) for path, inner in covered)
        return next((f"its {path} has {change}" for path, change in found if change), None)

    @property
    def counts_loops(self) -> bool:
        """Whether an edge from a node to itself counts besides the layer's own term."""
        return True

    def own_term(self, edges: "_Edges") -> Tensor:
        """Return how often a node is its own neighbour, float32 [1]."""
        raise NotImplementedError

    def over(self, x: Tensor, edges: "_Edges") -> Tensor:
        """Run the program on x [N, D] and a graph."""
        adjacency, mode = edges.adjacency.filled, self.mode_of({"x": x})
        layers = self._fit(self._layers_now(), mode)
        columns = self.layers[0].inputs
        if x.shape[1] != columns:
            raise ValueError(f"the nodes have {x.shape[1]} columns, but this layer takes {columns}")
        inputs = {"indptr": adjacency.indptr, "indices": adjacency.indices}
        if mode.backward:
            back = edges.adjacency.transposed.filled
            inputs |= {"reversed_indptr": back.indptr, "reversed_indices": back.indices}
        if any(layer.own for layer in layers):
            inputs["own"] = self.own_term(edges)
        if any(layer.factor for layer in layers):
            inputs["factor"] = self.factor(edges, inputs.get("own"))
        inputs["x"] = _filled(x, adjacency.nodes, layers[0].inputs)
        coarsens = self.node_bits is not None
        if coarsens:
            inputs["unit"] = self.units(edges)
        size = adjacency.nodes, len(adjacency.indices)
        program = graph_layers(self.quant, *size, layers, mode, coarsens)
        (y,) = self.execute(program, inputs)
        return y[: len(x), : layers[-1].outputs].to(result_dtype(x))

    def _layers_now(self) -> tuple[GraphLayer, ...]:
        """Return the layers with what users may change between passes."""
        return self.layers

    def factor(self, edges: "_Edges", own: Tensor | None) -> Tensor:
        """Return the factors of nodes, float32 [at least N]."""
        return edges.kept("mean", lambda: edges.degrees.clamp(min=1).reciprocal())

    def units(self, edges: "_Edges") -> Tensor:
        """Return the units of the codes of nodes (lsq.ops.coarsen), int8 [at least N]."""
        widths, largest = self.node_bits, self.quant.activations.largest
        key = ("units", *widths.items(), largest)
        return edges.kept(key, lambda: node_widths.units_of(edges.degrees, widths, largest))

    # State

    def __repr__(self) -> str:
        shown = super().__repr__()
        return shown if self.node_bits is None else f"{shown[:-1]}, node_bits={self.node_bits})"

    def other_names(self) -> list[str]:
        return [*super().other_names(), *([] if self.node_bits is None else [node_widths.NAME])]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        node_widths.save(destination, prefix, self.node_bits)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        node_widths.load(state_dict, prefix, self.node_bits)
        super()._load_from_state_dict(state_dict, prefix, *others)


_HOOKS = tuple(
    f"_{stage}_forward{kind}_hooks"
    for stage in ("propagate", "message", "aggregate", "message_and_aggregate")
    for kind in ("", "_pre")
)
"""Names of PyTorch Geometric's own hooks."""
_hooks_on_messages = itemgetter(*_HOOKS)
_SETTINGS = tuple(
    "add_self_loops aggr flow improved node_dim _decomposed_layers normalize project"
    " root_weight".split()
)
"""Attributes of layers from which programs are built."""


def _forget_explanation(conv: nn.Module) -> None:
    """Drop the method that an explanation leaves in a layer, if it is that of its class."""
    own = vars(conv).get("propagate")
    if own is not None and getattr(own, "__func__", None) is type(conv).propagate:
        del conv.propagate


def _filled(x: Tensor, nodes: int, columns: int) -> Tensor:
    """Return x [N, D] with zeros up to [nodes, columns]."""
    rows, width = x.shape
    if (rows, width) == (nodes, columns):
        return x
    return functional.pad(x, (0, columns - width, 0, nodes - rows))


class _Edges:
    """A graph as layers read it, and what they have computed from it."""

    def __init__(self, adjacency: Adjacency, listed: bool = False):
        self.adjacency, self._kept = adjacency, {}
        self.listed = listed
        """Whether edges were listed, and not given as a sparse tensor."""
        degrees = adjacency.degrees.float()
        self.degrees = functional.pad(degrees, (0, adjacency.filled.nodes - adjacency.nodes))

    def kept(self, name: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of the first call of `make` under this name."""
        if name not in self._kept:
            with torch.inference_mode(False):  # training may use it, too
                self._kept[name] = make()
        return self._kept[name]


def _edges_of(edge_index: Adjacency | Tensor, x: Tensor, *, loops: bool) -> _Edges | None:
    """Return the edges among the nodes x [N, D]; None if they have weights.

    `loops`: whether edges from a node to itself count where edges are listed; in a sparse tensor
    they always do, as in PyTorch Geometric.
    """
    key, listed = (len(x), loops), False
    given = edge_index.indptr if isinstance(edge_index, Adjacency) else edge_index
    if given.device != x.device:
        raise ValueError(
            f"the edges are on {given.device}, but the nodes are on {x.device}; move one of the two"
            " with .to()"
        )
    if isinstance(edge_index, Tensor):
        if edge_index.requires_grad:  # weights that are trained, whatever they are now
            return None
        listed = edge_index.layout == torch.strided
        if hasattr(edge_index, "as_tensor"):  # EdgeIndex of PyTorch Geometric, which has no memory
            _check_nodes(len(x), *edge_index.sparse_size())
            edge_index = edge_index.as_tensor()
        elif not listed:
            inner = edge_index.values() if edge_index.layout == torch.sparse_csr else edge_index
            key += (None if inner.is_inference() else inner._version,)
    return remembered(
        "edges", (edge_index,), key, lambda: _read(edge_index, len(x), loops), exact=listed
    )


def _check_nodes(nodes: int, *found: int | None) -> None:
    for one in found:
        if one not in (None, nodes):
            raise ValueError(f"the graph has {one} nodes, but there are {nodes} rows of features")


def _read(edge_index: Tensor | Adjacency, nodes: int, loops: bool) -> _Edges | None:
    if isinstance(edge_index, Adjacency):
        _check_nodes(nodes, edge_index.nodes)
        Adjacency.from_csr(
            edge_index.indptr, edge_index.indices
        )  # checks what a user may have made
        return _Edges(edge_index)
    if edge_index.layout in (torch.sparse_coo, torch.sparse_csc):
        edge_index = edge_index.clone().to_sparse_csr()  # inference tensors have no values here
    if edge_index.layout == torch.sparse_csr:
        _check_nodes(nodes, *edge_index.shape)
        values = edge_index.values()
        if values.dim() != 1 or not bool((values == 1).all()):
            return None
        return _Edges(Adjacency.from_csr(edge_index.crow_indices(), edge_index.col_indices()))
    if not loops and edge_index.dim() == 2 and len(edge_index) == 2:
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return _Edges(Adjacency.from_edges(edge_index, nodes), listed=True)


def _check_sums(conv: nn.Module, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `conv` sends messages as its class does by default."""
    if conv.aggr not in allowed:
        raise ValueError(f"its aggr is {conv.aggr!r}; a program has {', '.join(allowed)}")
    expected = f"{'Mean' if conv.aggr == 'mean' else 'Sum'}Aggregation"
    if type(conv.aggr_module).__name__ != expected:
        raise ValueError(f"its aggr_module is a {type(conv.aggr_module).__name__}")
    if conv.flow != "source_to_target" or conv.node_dim != -2 or conv.decomposed_layers != 1:
        raise ValueError("its flow, node_dim or decomposed_layers is not the default")


def _layer(
    prefix: str,
    weight: str,
    conv: nn.Module,
    *,
    root: str | None = None,
    bias: str | None = None,
    **fields,
) -> GraphLayer:
    shapes = {
        name: _check_linear(conv, name.removesuffix(".weight"), bias)
        for name in (weight, root)
        if name is not None
    }
    if len(set(shapes.values())) > 1:
        raise ValueError(
            "its weights are "
            + " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        )
    outputs, inputs = shapes[weight]
    return GraphLayer(
        prefix=prefix,
        weight=prefix + weight,
        root=root and prefix + root,
        bias=bias and prefix + bias,
        inputs=inputs,
        outputs=outputs,
        columns=outputs,
        **fields,
    )


def _check_linear(conv: nn.Module, path: str, bias: str | None) -> torch.Size:
    """Return the shape of a linear layer's weight; raises ValueError if it may compute something
    else than a product, and the bias of the name `bias`."""
    linear = module_at(conv, path)
    kind = type(linear)
    if kind.__name__ != "Linear" or not kind.__module__.startswith(GEOMETRIC):
        raise ValueError(f"its {path} is a {kind.__module__}.{kind.__qualname__}")
    weight = linear._parameters.get("weight")
    if weight is None or nn.parameter.is_lazy(weight):
        raise ValueError(f"its {path}.weight is no parameter with a size: run a pass first")
    if linear.bias is not None and bias != f"{path}.bias":
        raise ValueError(f"its {path} has a bias")
    return weight.shape


def _gcn(conv: nn.Module, prefix: str = "") -> GraphLayer:
    _check_sums(conv, SUMS)
    bias = None if conv.bias is None else "bias"
    return _layer(
        prefix,
        "lin.weight",
        conv,
        bias=bias,
        own=conv.add_self_loops,
        factor=conv.normalize,
        scaled=conv.normalize,
    )


def _sage(conv: nn.Module, prefix: str = "") -> GraphLayer:
    _check_sums(conv, ("mean", *SUMS))
    if conv.project:
        raise ValueError("it projects before it aggregates (project=True)")
    return _layer(
        prefix,
        "lin_l.weight",
        conv,
        root="lin_r.weight" if conv.root_weight else None,
        bias=None if conv.lin_l.bias is None else "lin_l.bias",
        factor=conv.aggr == "mean",
    )


def _unnormalised_sage(conv: nn.Module, prefix: str) -> GraphLayer:
    if conv.normalize:
        raise ValueError("its layers normalise their results")
    return _sage(conv, prefix)


class GCNLayer(Graph):
    """GCNConv: D^-1/2 (A + I) D^-1/2 x weight^T + bias (Kipf and Welling 2017, equation 2)."""

    @classmethod
    def layers_of(cls, module: nn.Module) -> tuple[GraphLayer, ...]:
        return (_gcn(module),)

    @property
    def _convolution(self) -> nn.Module:
        return self

    @property
    def counts_loops(self) -> bool:
        return not self._convolution.add_self_loops

    def own_term(self, edges: _Edges) -> Tensor:
        # PyTorch Geometric reads `improved` for sparse tensors alone, if edges have no weights
        times = 2.0 if self._convolution.improved and not edges.listed else 1.0
        return edges.kept(("own", times), lambda: edges.degrees.new_full((1,), times))

    def factor(self, edges: _Edges, own: Tensor | None) -> Tensor:
        def make() -> Tensor:
            degrees = edges.degrees if own is None else edges.degrees + own
            return degrees.rsqrt().masked_fill(degrees == 0, 0.0)

        return edges.kept(("gcn", own if own is None else id(own)), make)


class SAGELayer(Graph):
    """SAGEConv: the mean or sum of neighbours (Hamilton et al. 2017), then weights and bias."""

    @classmethod
    def layers_of(cls, module: nn.Module) -> tuple[GraphLayer, ...]:
        return (_sage(module),)

    def over(self, x: Tensor, edges: _Edges) -> Tensor:
        y = super().over(x, edges)
        return functional.normalize(y, p=2.0, dim=-1) if self.normalize else y


class GraphConvLayer(Graph):
    """GraphConv: a weight of neighbours and a weight of the node (Morris et al. 2019)."""

    @classmethod
    def layers_of(cls, module: nn.Module) -> tuple[GraphLayer, ...]:
        _check_sums(module, ("mean", *SUMS))
        bias = None if module.lin_rel.bias is None else "lin_rel.bias"
        fields = {"root": "lin_root.weight", "bias": bias, "factor": module.aggr == "mean"}
        return (_layer("", "lin_rel.weight", module, **fields),)


class GINLayer(Graph):
    """GINConv: nn((1 + eps) x + sum of neighbours) (Xu et al. 2019); nn is converted by itself."""

    @classmethod
    def layers_of(cls, module: nn.Module) -> tuple[GraphLayer, ...]:
        _check_sums(module, SUMS)
        width = 1  # that of its nodes from the first pass on
        return (GraphLayer(inputs=width, outputs=width, columns=width, weight=None, own=True),)

    @classmethod
    def covers(cls, path: str) -> bool:
        return not path.startswith("nn")

    def own_term(self, edges: _Edges) -> Tensor:
        return (1.0 + self.eps.detach()).float().view(1)

    def over(self, x: Tensor, edges: _Edges) -> Tensor:
        width = x.shape[1]
        if width != self.layers[0].inputs:
            self.layers = (replace(self.layers[0], inputs=width, outputs=width, columns=width),)
        y = super().over(x, edges)
        if self.eps.requires_grad:  # its own gradient, of a term that is zero
            y = y + (self.eps - self.eps.detach()) * x
        return self.nn(y)


@lru_cache
def _with_dropout(layers: tuple[GraphLayer, ...], dropout: float) -> tuple[GraphLayer, ...]:
    return (*(replace(one, dropout=dropout) for one in layers[:-1]), layers[-1])


class GraphStack(Graph):
    """A model of PyTorch Geometric: layers of one kind with an activation and dropout between."""

    CONVOLUTION: ClassVar[str]
    """Name of the class of its layers."""
    read: ClassVar[Callable[[nn.Module, str], GraphLayer]]
    """Reads one of its layers; raises ValueError if no program computes it."""

    @classmethod
    def layers_of(cls, module: nn.Module) -> tuple[GraphLayer, ...]:
        if module.jk_mode is not None or any(type(one) is not nn.Identity for one in module.norms):
            raise ValueError("it has norms or jumping knowledge between its layers")
        if type(module.dropout) is not nn.Dropout:
            raise ValueError(f"its dropout is a {type(module.dropout).__name__}")
        activation = "none" if module.act is None else activation_of(module.act)
        found = []
        for number, conv in enumerate(module.convs):
            if type(conv).__name__ != cls.CONVOLUTION:
                raise ValueError(f"its convs.{number} is a {type(conv).__name__}")
            found.append(cls.read(conv, f"convs.{number}."))
        kinds = {(one.own, one.factor, one.scaled) for one in found}
        if len(kinds) > 1 or len({getattr(conv, "improved", None) for conv in module.convs}) > 1:
            raise ValueError("its layers normalise or aggregate in different ways")
        *inner, last = found
        return (*(replace(one, activation=activation) for one in inner), last)

    def _departure(self, x: object, edge_index: object, others: Sequence) -> str | None:
        dropout = self.dropout
        if dropout.p == 1 or dropout.training is not self.training and dropout.p:
            return "its dropout leaves nothing, or is not in the mode of the model"
        return super()._departure(x, edge_index, others)

    def _layers_now(self) -> tuple[GraphLayer, ...]:
        return _with_dropout(self.layers, self.dropout.p if self.training else 0.0)


class GCNStack(GraphStack, GCNLayer):
    """GCN of PyTorch Geometric."""

    CONVOLUTION = "GCNConv"
    read = staticmethod(_gcn)

    @property
    def _convolution(self) -> nn.Module:
        return self.convs[0]


class SAGEStack(GraphStack):
    """GraphSAGE of PyTorch Geometric."""

    CONVOLUTION = "SAGEConv"
    read = staticmethod(_unnormalised_sage)
