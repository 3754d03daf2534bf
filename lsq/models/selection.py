"""Selection of the layers that `convert` changes, the reasons to leave others, and the report."""

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.layers.in_place import InPlace, class_in_place
from lsq.layers.linear import Projection, QuantizedLinear, in_out_of
from lsq.models.architectures import GRAPH_LAYERS, fused_class
from lsq.models.exact import GEOMETRIC, patched
from lsq.quant.formats import format_choice

Skip = str | Iterable[str] | Callable[[nn.Module, str], bool]
"""Names or patterns of modules to leave as they are, or a function of a module and its name."""
FLOAT_MODE = "mode is 'float', in which nothing is rounded"
"""The reason to leave linear layers, but not whole ones."""
IN_ATTENTION = "is of a torch.nn.MultiheadAttention, which multiplies by itself"
"""The reason to leave these weights if no whole layer around them is known."""
VOCABULARY = 8192
"""The least number of outputs of a layer that may be taken for a projection onto a vocabulary."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One linear layer of a model."""

    name: str
    """As in named_modules; "" is the model itself."""
    inputs: int
    outputs: int
    reason: str | None
    """Why it was left as it is; None: it was converted."""
    within: str | None = None
    """Name of the fused layer that contains it."""
    head: bool = False
    """Whether it projects onto the vocabulary; its logits are computed when they are read."""
    adapter: bool = False
    """Whether it belongs to an adapter of PEFT."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    def row(self) -> tuple[str, str, str]:
        """Return its columns in the report; unconverted adapters share a line."""
        if self.adapter and self.reason is not None:
            return "PEFT's adapters", "", self.reason.rpartition(": ")[2]
        kind = "in a fused layer" if self.within is not None else "with its loss" * self.head
        return self.name, f"{self.inputs} → {self.outputs}", self.reason or kind


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A layer of a model for which a program exists."""

    name: str
    """As in named_modules; "" is the model itself."""
    kind: str
    reason: str | None
    """Why it is not fused, and its linear layers are seen one by one; None: it is fused."""

    def row(self) -> tuple[str, str, str]:
        return self.name, self.kind, f"not fused: {self.reason}" if self.reason else "fused"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A parameter with weights of several linear layers, such as experts; it stays a float."""

    name: str
    shape: tuple[int, ...]

    def row(self) -> tuple[str, str, str]:
        return self.name, " × ".join(map(str, self.shape)), f"{math.prod(self.shape):,} weights"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every linear layer of a model; print it. Names that differ by numbers alone share a line."""

    layers: tuple[Layer, ...]
    numbers: str = "in int8"
    """The formats of converted layers in words, see QuantConfig.summary."""
    whole: tuple[Whole, ...] = ()
    stacks: tuple[Stack, ...] = ()
    unknown: str | None = None
    """The class of a model of transformers, if no program exists for any of its layers."""

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the layers that run as one program."""
        return tuple(one.name for one in self.whole if one.reason is None)

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the linear layers that were converted."""
        return tuple(layer.name for layer in self.layers if layer.reason is None)

    @property
    def left(self) -> dict[str, str]:
        """Names of the other linear layers -> why they were left."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason is not None}

    def __str__(self) -> str:
        converted = [layer for layer in self.layers if layer.reason is None]
        left = [layer for layer in self.layers if layer.reason is not None]
        part, total = (sum(one.weights for one in layers) for layers in (converted, self.layers))
        share = f", {part:,} of their {total:,} weights ({part / total:.1%})" if total else ""
        title = f"{len(converted)} of {len(self.layers)} linear layers run {self.numbers}{share}:"
        lines = [title, *_lines(converted)]
        for title, entries in (
            ("left as they are:", left),
            ("stacks of weights, which stay floats:", self.stacks),
            ("whole layers:", self.whole),
        ):
            lines += [title, *_lines(entries)] if entries else []
        if self.unknown is not None:
            lines.append(
                f"whole layers: none of {self.unknown} is one that lsq knows; linear layers run one"
                " by one"
            )
        return "\n".join(lines)

    __repr__ = __str__


def _lines(entries: Iterable[Layer | Whole | Stack]) -> list[str]:
    """Format a line for all rows whose names differ by numbers alone."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, *columns in (entry.row() for entry in entries):
        pattern = re.sub(r"\b\d+\b", "*", name) or "the model itself"
        names.setdefault((pattern, *columns), []).append(name)
    counts = {
        (every[0] if len(every) == 1 and every[0] else pattern, *columns): len(every)
        for (pattern, *columns), every in names.items()
    }
    widths = [max((len(row[column]) for row in counts), default=0) for column in range(2)]
    return [
        f"  {count:>4} × {name:<{widths[0]}}  {what:<{widths[1]}}  {reason}".rstrip()
        for (name, what, reason), count in counts.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A linear layer, or a whole layer with a program, and the class that it becomes."""

    module: nn.Module
    kind: type[InPlace] | None
    """The new class; None: it stays, or a whole layer around it is converted."""
    entry: Layer | Whole


def conversions(
    model: nn.Module,
    quant: QuantConfig,
    skip: Skip = (),
    *,
    minimum_width: int,
    tied: bool = False,
    fused: bool = True,
) -> list[Conversion]:
    """List whole layers with a program, and all linear layers; see lsq.convert for arguments."""
    names = dict(model.named_modules())
    skips = skipping(skip, names)
    embeddings = {
        id(module.weight): name
        for name, module in names.items()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    converted = [module for module in names.values() if isinstance(module, InPlace)]
    inside = {id(part) for module in converted for part in module.modules()}
    adapters = _adapters(names)
    heads = _heads(names) if fused and not _packed(quant) else set()
    linears: list[Conversion] = []
    obstacles: dict[str, bool] = {}
    """Names of linear layers around which no whole layer is converted -> whether because of their
    widths alone."""
    for name, module, (inputs, outputs) in _linears(names):
        adapter, head = id(module) in adapters, id(module) in heads
        narrow = None
        reason = obstacle = (
            ("is lsq's already" if id(module) in inside and not adapter else None)
            or ("skip names it" if skips(module, name) else None)
            or (None if quant.quantized else FLOAT_MODE)
            or _unusual(module, quant)
        )
        if reason is None:
            tiles = DIMENSION_MULTIPLE if quant.coded or quant.formats_differ else 1
            embedding = None if tied else embeddings.get(id(module.weight))
            shared = embedding and (
                f"shares its weight with the embedding {embedding} (tied=True converts it)"
            )
            # whole layers gain at any width, and a head may have any number of outputs
            narrow = _unfit(inputs, outputs, 1, tiles)
            obstacle = narrow or shared
            reason = _unfit(inputs, inputs if head else outputs, minimum_width, tiles)
            reason = reason or (None if head else shared)
        if obstacle not in (None, FLOAT_MODE, IN_ATTENTION) and not adapter:
            obstacles[name] = obstacle == narrow
        kind = None
        if reason is None and head:
            from lsq.layers.head import head_class  # late: other models do not need it

            kind = head_class()
        elif reason is None:
            kind = _kind_of(module)
        layer = Layer(
            name=name,
            inputs=inputs,
            outputs=outputs,
            reason=reason,
            head=head and reason is None,
            adapter=adapter,
        )
        linears.append(Conversion(module=module, kind=kind, entry=layer))
    wholes = _wholes(names, quant, obstacles, skips) if fused else []
    converted = [whole for whole in wholes if whole.kind is not None]
    return [*wholes, *(_within(linear, converted) for linear in linears)]


def _kind_of(module: nn.Module) -> type[InPlace]:
    """Return the class that a linear layer becomes."""
    if type(module) is nn.Linear:
        return QuantizedLinear
    if _is_conv1d(module):
        return in_out_of(type(module))
    return class_in_place(Projection, type(module), f"Quantized{type(module).__name__}")


def _inside(name: str, whole: str, kind: type[InPlace]) -> bool:
    """Whether a linear layer's weight is one of the program of the whole layer around it."""
    prefix = f"{whole}." if whole else ""
    return name.startswith(prefix) and kind.covers(name.removeprefix(prefix))


def _wholes(
    names: Mapping[str, nn.Module],
    quant: QuantConfig,
    obstacles: Mapping[str, bool],
    skips: Callable[[nn.Module, str], bool],
) -> list[Conversion]:
    wholes: list[Conversion] = []
    for name, module in names.items():
        kind = fused_class(module)
        around = [one for one in wholes if one.kind and _inside(name, one.entry.name, one.kind)]
        if around or kind is None and not _sends_messages(module):
            continue
        prefix = f"{name}." if name else ""
        lefts = [
            linear
            for linear, narrow in obstacles.items()
            if kind and _inside(linear, name, kind) and not (narrow and kind.any_width)
        ]
        left = next(iter(lefts), None)
        reason = None
        if kind is None:
            reason = f"programs exist for {', '.join(GRAPH_LAYERS)}"
        elif left is not None:  # the report gives its reason beside its name
            reason = f"its {left.removeprefix(prefix)} is left"
        elif kind.any_width and skips(module, name):
            reason = "skip names it"
        else:
            try:
                kind.check(module)
                kind.config_of(module, quant)
            except ValueError as error:
                reason = str(error)
        entry = Whole(name=name, kind=type(module).__name__, reason=reason)
        wholes.append(Conversion(module=module, kind=kind if reason is None else None, entry=entry))
    return wholes


def _within(linear: Conversion, wholes: list[Conversion]) -> Conversion:
    """Leave a linear layer to the converted layer that holds it, if there is one."""
    if linear.entry.adapter:
        return linear
    for whole in reversed(wholes):
        if _inside(linear.entry.name, whole.entry.name, whole.kind):
            entry = replace(linear.entry, within=whole.entry.name, reason=None)
            return replace(linear, kind=None, entry=entry)
    return linear


def stacks_of(model: nn.Module, minimum_width: int) -> tuple[Stack, ...]:
    """Return parameters [layers, N, K], outside of torch.nn's modules, that may be weights."""
    return tuple(
        Stack(name=f"{prefix}.{name}" if prefix else name, shape=tuple(parameter.shape))
        for prefix, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module.named_parameters(recurse=False)
        if not nn.parameter.is_lazy(parameter)
        and parameter.dim() == 3
        and len(parameter) > 1
        and min(parameter.shape[1:]) >= minimum_width
    )


def skipping(skip: Skip, names: Iterable[str]) -> Callable[[nn.Module, str], bool]:
    """Return a function of (module, name) that says whether to leave the module.

    Raises TypeError for another type of `skip`, and ValueError for a pattern that fits no name.
    """
    if callable(skip):
        return skip
    several = isinstance(skip, Iterable) and not isinstance(skip, str)
    patterns = list(skip) if several else [skip]
    if not all(isinstance(one, str) for one in patterns):
        raise TypeError(
            f"skip is {skip!r:.80}; it must be a name or a list of names, such as 'lm_head', or a"
            " function of (layer, name)"
        )
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            every = {part for name in names for part in _ends(name)}
            near = difflib.get_close_matches(pattern, every, n=3)
            last = sorted({name.rpartition(".")[2] for name in names if name})[:SHOWN]
            hint = f"; near are {', '.join(near)}" if near else ""
            hint = hint or (f"; there are {', '.join(last)}" if last else "")
            raise ValueError(
                f"skip names {pattern!r}, but no module of this model is called so{hint}"
            )
    return lambda module, name: any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits the name of a module or of a module around it, or its end."""
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(end, pattern) for path in around for end in _ends(path))


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the Conv1D of transformers: a linear layer with a weight [inputs, outputs]."""
    weight = getattr(module, "weight", None)
    known = type(module).__name__ == "Conv1D" and hasattr(module, "nx")
    return known and isinstance(weight, torch.Tensor) and weight.dim() == 2


def _is_geometric(module: nn.Module) -> bool:
    """Whether it is the Linear of PyTorch Geometric."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "torch_geometric.nn.dense.linear"


def _sends_messages(module: nn.Module) -> bool:
    """Whether it is a graph layer of PyTorch Geometric, or of a user, that lsq has not changed."""
    return not isinstance(module, InPlace) and any(
        kind.__name__ == "MessagePassing" and kind.__module__.startswith(GEOMETRIC)
        for kind in type(module).__mro__
    )


def _linears(names: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
    """Yield (name, module, (inputs, outputs)) of every weight of a linear layer."""
    for name, module in names.items():
        if isinstance(module, Projection):
            yield name, module, module.sizes
        elif isinstance(module, nn.Linear) and not isinstance(module, nn.LazyLinear):
            yield name, module, (module.in_features, module.out_features)
        elif _is_conv1d(module):
            yield name, module, tuple(module.weight.shape)
        elif _is_geometric(module):
            yield name, module, (module.in_channels, module.out_channels)
        elif isinstance(module, nn.MultiheadAttention):  # its out_proj is a linear layer
            for own, weight in module.named_parameters(prefix=name, recurse=False):
                if own.endswith("_weight"):
                    yield own, module, tuple(weight.shape[::-1])


def _adapters(names: Mapping[str, nn.Module]) -> set[int]:
    """Return ids of modules that PEFT has put beside the layers that it wraps."""
    wrappers = [
        module
        for module in names.values()
        if type(module).__module__.startswith("peft.") and hasattr(module, "base_layer")
    ]
    return {
        id(part)
        for wrapper in wrappers
        for part in set(wrapper.modules()) - set(wrapper.base_layer.modules())
    }


def _heads(names: Mapping[str, nn.Module]) -> set[int]:
    """Return ids of projections onto a vocabulary without a bias: as models say, or by width."""
    models = [module for module in names.values() if hasattr(module, "get_output_embeddings")]
    heads = [module.get_output_embeddings() for module in models] or [
        module
        for module in names.values()
        if type(module) is nn.Linear
        and module.out_features >= max(VOCABULARY, 6 * module.in_features)
    ]
    return {id(head) for head in heads if type(head) is nn.Linear and head.bias is None}


def _packed(quant: QuantConfig) -> bool:
    """Whether a weight may be stored as int4; formats such as int4/row are decoded."""
    return "int4" in format_choice(quant.weight_format).formats


def _unusual(module: nn.Module, quant: QuantConfig) -> str | None:
    kind, conv1d, geometric = type(module), _is_conv1d(module), _is_geometric(module)
    if isinstance(module, nn.MultiheadAttention | NonDynamicallyQuantizableLinear):
        return IN_ATTENTION
    if kind is not nn.Linear and not (conv1d or geometric):
        return f"is a {kind.__name__}, which may compute something else"
    if "forward" in vars(module):
        return "has a forward of its own, as hooks of accelerate put it in; convert first"
    changed = patched(kind)
    if changed:
        return f"has {changed}"
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters.keys() <= {"weight", "bias"} or "weight" not in parameters:
        return (
            f"has the parameters {', '.join(parameters) or 'of nobody'} in place of weight and bias"
        )
    if type(module.weight) is not nn.Parameter:
        return f"has a weight that is a {type(module.weight).__name__}"
    if module.weight.dtype not in DTYPES:
        return f"has a weight of {module.weight.dtype}"
    if conv1d:
        sizes, outputs = (module.nx, module.nf), module.nf
    elif geometric:
        sizes, outputs = (module.out_channels, module.in_channels), module.out_channels
    else:
        sizes, outputs = (module.out_features, module.in_features), module.out_features
    if tuple(module.weight.shape) != sizes:
        return f"has a weight {list(module.weight.shape)} in the place of {list(sizes)}"
    bias = parameters.get("bias")
    if bias is not None and (bias.dtype not in DTYPES or bias.shape != (outputs,)):
        return f"has a bias of {bias.dtype} {list(bias.shape)}"
    if conv1d and _packed(quant):
        return "has a weight [inputs, outputs], which int4 does not store"
    return None


def _unfit(inputs: int, outputs: int, minimum_width: int, multiple: int) -> str | None:
    for name, width in (("inputs", inputs), ("outputs", outputs)):
        if width < minimum_width:
            return f"{width} {name}: narrower than {minimum_width} gains nothing (minimum_width)"
        if width % multiple:
            return f"{width} {name}: int8 products need a multiple of {multiple}"
    return None
