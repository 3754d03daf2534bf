"""Bits of a graph network within budgets: of nodes by their degree, and of each layer.

Nodes are cut by degree into buckets of nearly equal counts, and each bucket gets a width for the
rows of its nodes in all graph layers (lsq.models.set_node_bits). Each layer gets a width of its
weights and one of its activations; the row of a node has the smaller one of its bucket's and that.
Kernels of graph convolutions are weights of their layers, and neighbours are summed without
products. Every mix is measured by the converted model itself, whose products all read codes.

    memory      = sum over buckets of nodes x columns x bits + sum over layers of weights x bits
    computation = sum over layers of products of numbers x bits of weights x bits of activations

`columns` are those of the inputs of all graph layers together. Since computation multiplies both
widths of a layer, a choice of a layer is the pair. These are formulas: lsq itself holds a code of
few bits in a byte, and multiplies it as one.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.layers.in_place import InPlace
from lsq.models.conversion import convert
from lsq.models.node_widths import has_node_bits, set_node_bits
from lsq.quant import maximum_code
from lsq.study.allocation import groups_of
from lsq.study.knapsack import Choice, Item, Problem, exact
from lsq.study.products import inputs_replaced
from lsq.study.proposals import Picked
from lsq.study.search import LARGEST, SEARCHES, Search
from lsq.study.sensitivity import still

WIDTHS = (2, 3, 4, 6, 8)
BITS = 8
"""Most bits of a code."""
KEPT = 16
"""Converted models that are kept, since mixes often differ in the bits of nodes alone."""


def buckets_of(degrees: Tensor, count: int) -> dict[int, int]:
    """Cut nodes by degree into at most `count` buckets of nearly equal numbers of nodes.

    All nodes of one degree are in one bucket. Returns least degree -> nodes; the first one is 0.
    """
    if count < 1:
        raise ValueError(f"there shall be {count} buckets of nodes; give 1 at least")
    distinct, sizes = degrees.unique(return_counts=True)
    ends = sizes.cumsum(0)
    cuts = [int((ends - len(degrees) * one / count).abs().argmin()) for one in range(1, count)]
    first = [0, *sorted({one + 1 for one in cuts} - {len(distinct)})]
    least = [0, *(int(distinct[one]) for one in first[1:])]
    nodes = [int(sizes[one:end].sum()) for one, end in itertools.pairwise([*first, len(distinct)])]
    return dict(zip(least, nodes, strict=True))


@dataclass(frozen=True, kw_only=True)
class GraphAllocation:
    """Bits of a graph network."""

    node_bits: Mapping[int, int]
    """Least degree -> bits, for lsq.models.set_node_bits."""
    weights: Mapping[str, int]
    """Path of a layer that has rounded weights -> bits."""
    activations: Mapping[str, int]
    """Path of a layer -> bits."""

    @property
    def weight_format(self) -> str:
        """The widths of weights as QuantConfig.weight_format takes them."""
        every = [*self.weights.values()] or [BITS]
        others = max(dict.fromkeys(every), key=every.count)
        return ",".join(
            [
                f"int{others}/row",
                *(f"{path}.*=int{b}/row" for path, b in self.weights.items() if b != others),
            ]
        )

    @property
    def configs(self) -> dict[str, QuantConfig]:
        """The modules to convert, by path, and how: the whole model, "", if all activations have
        one width, and else each layer by itself, since a model that lsq fuses has one width."""
        if len({*self.activations.values()}) == 1:
            (bits,) = {*self.activations.values()}
            return {"": QuantConfig(bits=bits, weight_format=self.weight_format)}
        return {
            path: QuantConfig(bits=bits, weight_format=f"int{self.weights.get(path, BITS)}/row")
            for path, bits in self.activations.items()
        }

    @property
    def clip_bits(self) -> int:
        """Bits for which clips of nodes' rows are measured: about the mean of nodes. All nodes
        share clips; those for the most bits would leave codes of few bits no resolution."""
        return round(sum(self.node_bits.values()) / len(self.node_bits))

    def convert(self, model: nn.Module, x: Tensor, edges: Tensor) -> None:
        """Convert a float model in place, measure clips in a pass on this graph, and set the bits
        of nodes. Predictions are then those that were measured, if the graph is the same."""
        narrow = copy.deepcopy(model).requires_grad_(False)
        for one, most in ((model, BITS), (narrow, self.clip_bits)):
            for path, quant in self.configs.items():
                quant = replace(quant, bits=min(quant.bits, most))
                convert(one.get_submodule(path), quant, minimum_width=DIMENSION_MULTIPLE)
            with still(one, ()), torch.no_grad():
                one(x, edges)
        for path, module in model.named_modules():
            if has_node_bits(module):
                clips = narrow.get_submodule(path).activation_clips()
                with torch.no_grad():
                    for name, clip in module.activation_clips().items():
                        clip.copy_(clips[name])
        self.set_node_bits(model)

    def set_node_bits(self, model: nn.Module) -> None:
        """Set the bits of nodes in a model that `convert` has converted."""
        for path, quant in self.configs.items():
            module = model.get_submodule(path)
            if any(map(has_node_bits, module.modules())):
                bits = {least: min(one, quant.bits) for least, one in self.node_bits.items()}
                set_node_bits(module, bits)


@dataclass(kw_only=True)
class _Layer:
    """A layer that lsq.convert rounds."""

    columns: int = 0
    """Columns of its input, if that has rows of nodes that follow their buckets."""
    weights: int = 0
    products: int = 0
    """Products of a weight and an activation in a pass."""


class _Finished(Exception):
    """No more mixes may be measured."""


def _covers(layer: str, path: str) -> bool:
    """Whether a module or parameter at `path` is inside a layer."""
    return not layer or path.startswith(f"{layer}.")


class GraphAllocator:
    """A problem of lsq.study.knapsack for a graph network, and what its choices measure.

    Its items are the buckets of nodes, then the layers. Costs are divergences from the predictions
    of the float model (KL, in nats) with one item rounded, and all others at the largest width.
    These add up poorly below 4 bits, which `search` is for.

    Args:
        model: float, of layers of PyTorch Geometric; called as model(x, edges). It stays as it is.
        x, edges: features of nodes [N, D], and edges [2, E] that lead from the first to the second.
        nodes: whose predictions count, a mask or numbers; None: all.
        buckets: most buckets of nodes.
        widths: bits to choose from.
        by_layer: False: one width for the weights of all layers, and one for their activations.
        activations: False: they have the largest width, apart from rows of nodes; for budgets of
            memory alone.

    Raises:
        ValueError: an argument is wrong, or the model has no layers that lsq.convert knows as graph
            layers.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        edges: Tensor,
        *,
        nodes: Tensor | None = None,
        buckets: int = 4,
        widths: Sequence[int] = WIDTHS,
        by_layer: bool = True,
        activations: bool = True,
    ):
        if not widths:
            raise ValueError("there are no widths; give one at least")
        for width in widths:
            maximum_code(width)
        if edges.layout is not torch.strided or edges.dim() != 2 or len(edges) != 2:
            raise ValueError(f"edges are {list(edges.shape)}, {edges.layout}; give dense [2, E]")
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._x, self._edges = x, edges
        self._nodes = slice(None) if nodes is None else nodes
        self.widths = tuple(sorted(set(widths)))
        self.layers, counts_loops = self._found()
        self._floats = self._counted()
        seen = edges if counts_loops else edges[:, edges[0] != edges[1]]
        self.buckets = buckets_of(seen[1].bincount(minlength=len(x)), buckets)
        """Least degree -> nodes."""
        self.groups = [[path] for path in self.layers] if by_layer else [[*self.layers]]
        """Paths of layers that get one pair of widths."""
        largest = self.widths[-1:]
        self.pairs = [*itertools.product(self.widths, self.widths if activations else largest)]
        """Bits of weights and of activations."""
        self._converted = lru_cache(KEPT)(self._convert)

    def problem(self, *, memory: float | None = None, computation: float | None = None) -> Problem:
        """Return the problem of these budgets; ValueError: there are none, or one is not above 0.

        Args:
            memory: the most bytes.
            computation: the most products of numbers x bits of weights x bits of activations.
        """
        limits = [memory and 8 * memory, computation]
        used = [number for number, limit in enumerate(limits) if limit is not None]
        if not used:
            raise ValueError("there is no budget; give memory or computation")
        for name, limit in (("memory", memory), ("computation", computation)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{name} is {limit}; it must be a finite number above 0")
        items = [
            Item(
                name=name,
                choices=tuple(
                    Choice(name=one, cost=cost, takes=tuple(takes[number] for number in used))
                    for (one, takes), cost in zip(choices.items(), costs, strict=True)
                ),
            )
            for (name, choices), costs in zip(self._takes.items(), self.costs, strict=True)
        ]
        return Problem(items=tuple(items), budgets=tuple(limits[number] for number in used))

    def picked(self, *, memory: float | None = None, computation: float | None = None) -> Picked:
        """Return the numbers of the choices that cost least within budgets; see `problem`.

        Raises:
            ValueError: there is no budget, or nothing fits.
            MissingPackage: scipy is missing.
        """
        problem = self.problem(memory=memory, computation=computation)
        found = exact(problem)
        if found is None:
            least = self.takes(self.uniform(min(self.widths)))
            raise ValueError(
                f"memory is {memory}, computation {computation}, but {min(self.widths)} bits"
                f" everywhere take {least[0]:,.0f} bytes and a computation of {least[1]:,.0f};"
                " give larger budgets, or smaller widths"
            )
        return found

    def search(
        self,
        *,
        memory: float | None = None,
        computation: float | None = None,
        how: Search | None = None,
    ) -> Picked:
        """Return the best choices within budgets that a search measures; it begins with `picked`.

        Args:
            memory, computation: as for `problem`.
            how: None: Search(). Its rule does not count.
        """
        how, seen = how or Search(), {}

        def measure(mix: Picked) -> float:
            if mix not in seen:
                if len(seen) == how.mixes:
                    raise _Finished
                seen[mix] = self.measure(mix)
            return seen[mix]

        problem = self.problem(memory=memory, computation=computation)
        start = self.picked(memory=memory, computation=computation)
        with contextlib.suppress(_Finished):
            measure(start)
            SEARCHES[how.method](problem, start, measure, how.seed)
        return min(filter(problem.fits, seen), key=seen.get)

    def uniform(self, bits: int) -> Picked:
        """Return the choices of one of the widths everywhere."""
        if bits not in self.widths:
            raise ValueError(f"{bits} bits everywhere are not among the widths {self.widths}")
        read = bits if (bits, bits) in self.pairs else self.widths[-1]
        nodes, layers = self.widths.index(bits), self.pairs.index((bits, read))
        return (nodes,) * len(self.buckets) + (layers,) * len(self.groups)

    def takes(self, picked: Sequence[int]) -> tuple[float, float]:
        """Return the memory in bytes and the computation of choices."""
        chosen = [
            [*choices.values()][one]
            for choices, one in zip(self._takes.values(), picked, strict=True)
        ]
        bits, computation = map(sum, zip(*chosen, strict=True))
        return bits / 8, float(computation)

    def allocation(self, picked: Sequence[int]) -> GraphAllocation:
        count, weights, activations = len(self.buckets), {}, {}
        for group, one in zip(self.groups, picked[count:], strict=True):
            for path in group:
                weight, activations[path] = self.pairs[one]
                if self.layers[path].weights:
                    weights[path] = weight
        most = max(bits for path, bits in activations.items() if self.layers[path].columns)
        nodes = (min(self.widths[one], most) for one in picked[:count])
        return GraphAllocation(
            node_bits=dict(zip(self.buckets, nodes, strict=True)),
            weights=weights,
            activations=activations,
        )

    @torch.no_grad()
    def predictions(self, picked: Sequence[int]) -> Tensor:
        """Return the outputs of the converted model [N, classes]."""
        found = self.allocation(picked)
        model = self._converted(tuple(picked[len(self.buckets) :]), found.clip_bits)
        found.set_node_bits(model)
        return model(self._x, self._edges)

    def measure(self, picked: Sequence[int]) -> float:
        """Return the divergence of the predictions with these choices; LARGEST if not finite."""
        before, now = (
            logits[self._nodes].double().log_softmax(1)
            for logits in (self._floats, self.predictions(picked))
        )
        divergence = float((before.exp() * (before - now)).sum(1).mean())
        return max(divergence, 0.0) if math.isfinite(divergence) else LARGEST

    @cached_property
    def costs(self) -> list[list[float]]:
        """The divergence of each choice of each item, by itself."""
        widest, every = self.uniform(max(self.widths)), []
        for number, choices in enumerate(self._takes.values()):
            mixes = [(*widest[:number], one, *widest[number + 1 :]) for one in range(len(choices))]
            every.append([self.measure(mix) for mix in mixes])
        return every

    @cached_property
    def _takes(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Item -> choice -> (bits of memory, computation)."""
        columns = sum(layer.columns for layer in self.layers.values())
        found = {
            f"nodes of degree {least} or more": {
                str(bits): (nodes * columns * bits, 0) for bits in self.widths
            }
            for least, nodes in self.buckets.items()
        }
        for group in self.groups:
            weights = sum(self.layers[path].weights for path in group)
            products = sum(self.layers[path].products for path in group)
            found["layers " + ", ".join(group)] = {
                self._name(weight, activation): (
                    weights * weight,
                    products * weight * activation,
                )
                for weight, activation in self.pairs
            }
        return found

    def _name(self, weight: int, activation: int) -> str:
        """Name a pair, those of uniform mixes alike."""
        alike = weight == activation or (weight, weight) not in self.pairs
        return str(weight) if alike else f"{weight} x {activation}"

    def _found(self) -> tuple[dict[str, _Layer], bool]:
        """Return the layers by path, and whether an edge from a node to itself counts."""
        model, found, graphs = copy.deepcopy(self._model), {}, []
        convert(model, QuantConfig(), minimum_width=DIMENSION_MULTIPLE, check=False)
        for path, module in model.named_modules():
            if has_node_bits(module):
                graphs.append(module)
                for layer in module.layers:
                    found[".".join(filter(None, (path, layer.prefix.rstrip("."))))] = _Layer()
            elif isinstance(module, InPlace) and not any(_covers(one, path) for one in found):
                found[path] = _Layer()
        if not graphs:
            raise ValueError(
                f"no layer of this {type(self._model).__name__} becomes a graph layer of lsq; give"
                " a model of GCNConv, SAGEConv, GraphConv or GINConv of PyTorch Geometric"
            )
        return found, all(one.counts_loops for one in graphs)

    @torch.no_grad()
    def _counted(self) -> Tensor:
        """Count columns, weights and products of the layers; return what the float model says."""
        groups = groups_of(self._model, minimum_width=DIMENSION_MULTIPLE).weights
        weights = {name: self._model.get_parameter(name) for group in groups for name in group}
        owners = {
            name: next(layer for path, layer in self.layers.items() if _covers(path, name))
            for name in weights
        }
        for name, weight in weights.items():
            owners[name].weights += weight.numel()

        def count(name: str, read: Tensor, transposed: bool) -> Tensor:
            owners[name].products += read.numel() * len(weights[name])
            return read

        def note(layer: _Layer, given: tuple) -> None:
            layer.columns = given[0].shape[1]

        with contextlib.ExitStack() as stack:
            for path, layer in self.layers.items():
                module = self._model.get_submodule(path)
                if hasattr(module, "propagate"):
                    hook = lambda _, given, layer=layer: note(layer, given)  # noqa: E731
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            stack.enter_context(inputs_replaced(weights, count))
            return self._model(self._x, self._edges)

    def _convert(self, layers: tuple[int, ...], clip_bits: int) -> nn.Module:
        """Return a converted copy whose clips were measured, for choices of the layers."""
        model = copy.deepcopy(self._model)
        found = self.allocation((*(0,) * len(self.buckets), *layers))
        found = replace(found, node_bits=dict.fromkeys(self.buckets, clip_bits))
        found.convert(model, self._x, self._edges)
        return model
