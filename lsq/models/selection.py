"""What `convert` makes of each layer of a model, and why it leaves the others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.layers.in_place import InPlace
from lsq.layers.linear import Projection, QuantizedLinear, in_out_of
from lsq.models.architectures import fused_class
from lsq.models.exact import patched
from lsq.models.report import Layer, Stack, Whole
from lsq.models.skip import Skip, skipping
from lsq.quant.choices import format_choice

FLOAT_MODE = "mode is 'float', in which nothing is rounded"
"""Why linear layers stay, but not whole ones."""
IN_ATTENTION = "is of a torch.nn.MultiheadAttention, which multiplies by itself"
"""Why its weights stay where no whole layer around it is known."""
VOCABULARY = 8192
"""Outputs from which on a layer may be taken for a projection onto a vocabulary."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A linear layer, or a whole layer that there is a program for, and what becomes of it."""

    module: nn.Module
    kind: type[InPlace] | None
    """The class that it gets; None: it stays, or a whole layer around it is converted."""
    entry: Layer | Whole
    """Its entry in the report: its name, and why it stays."""


def conversions(
    model: nn.Module,
    quant: QuantConfig,
    skip: Skip = (),
    *,
    minimum_width: int,
    tied: bool = False,
    fused: bool = True,
) -> list[Conversion]:
    """List the whole layers of `model` that there is a program for, and all linear layers.

    See lsq.convert for the arguments.

    Raises:
        ValueError: a pattern in `skip` fits no module.
    """
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
    obstacles: dict[str, str] = {}
    """Names of linear layers -> why no whole layer around them is converted."""
    for name, module, (inputs, outputs) in _linears(names):
        adapter, head = id(module) in adapters, id(module) in heads
        reason = obstacle = (
            ("is lsq's already" if id(module) in inside and not adapter else None)
            or ("skip names it" if skips(module, name) else None)
            or (None if quant.quantized else FLOAT_MODE)
            or _unusual(module, quant)
        )
        if reason is None:
            tiles = DIMENSION_MULTIPLE if quant.coded or quant.formats_differ else 1
            shared = None if tied else _shared(module, embeddings)
            # whole layers gain whatever the widths are, and a head's outputs may be any number
            obstacle = _unfit(inputs, outputs, 1, tiles) or shared
            reason = _unfit(inputs, inputs if head else outputs, minimum_width, tiles)
            reason = reason or (None if head else shared)
        if obstacle not in (None, FLOAT_MODE, IN_ATTENTION) and not adapter:
            obstacles[name] = obstacle
        kind = None
        if reason is None:
            kind = _head_class() if head else _linear_class(type(module))
        layer = Layer(
            name=name,
            inputs=inputs,
            outputs=outputs,
            reason=reason,
            head=head and reason is None,
            adapter=adapter,
        )
        linears.append(Conversion(module=module, kind=kind, entry=layer))
    wholes = _wholes(names, quant, obstacles) if fused else []
    converted = [whole.entry.name for whole in wholes if whole.kind is not None]
    return [*wholes, *(_within(linear, converted) for linear in linears)]


def _wholes(
    names: Mapping[str, nn.Module], quant: QuantConfig, obstacles: Mapping[str, str]
) -> list[Conversion]:
    """Every layer whose class there is a program for."""
    wholes = []
    for name, module in names.items():
        kind = fused_class(module)
        if kind is None:
            continue
        prefix = f"{name}." if name else ""
        left = next((linear for linear in obstacles if linear.startswith(prefix)), None)
        reason = None
        if left is not None:  # the reason stands beside its name
            reason = f"its {left.removeprefix(prefix)} is left"
        else:
            try:
                kind.check(module)
                kind.config_of(module, quant)
            except ValueError as error:
                reason = str(error)
        entry = Whole(name=name, kind=type(module).__name__, reason=reason)
        wholes.append(Conversion(module=module, kind=kind if reason is None else None, entry=entry))
    return wholes


def _within(linear: Conversion, wholes: list[str]) -> Conversion:
    """The same of a linear layer that one of the converted whole layers may be around."""
    if linear.entry.adapter:
        return linear
    for whole in reversed(wholes):
        if not whole or linear.entry.name.startswith(f"{whole}."):
            entry = replace(linear.entry, within=whole, reason=None)
            return replace(linear, kind=None, entry=entry)
    return linear


def stacks_of(model: nn.Module, minimum_width: int) -> tuple[Stack, ...]:
    """Parameters [layers, ...] that are wide enough to be weights of several linear layers, as of
    experts.

    Parameters of PyTorch's own modules, such as convolutions, are something else.
    """
    return tuple(
        Stack(name=f"{prefix}.{name}" if prefix else name, shape=tuple(parameter.shape))
        for prefix, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) > 1 and min(parameter.shape[1:]) >= minimum_width
    )


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the Conv1D of transformers, which GPT-2 has: a linear layer with a weight
    [inputs, outputs]."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nx")
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
    )


def _head_class() -> type[InPlace]:
    from lsq.layers.head import head_class  # which models without a vocabulary do not need

    return head_class()


def _linear_class(float_class: type[nn.Module]) -> type[InPlace]:
    return QuantizedLinear if float_class is nn.Linear else in_out_of(float_class)


def _linears(names: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
    """(name, module, (inputs, outputs)) of every weight of a linear layer."""
    for name, module in names.items():
        if isinstance(module, Projection):
            yield name, module, module.sizes
        elif isinstance(module, nn.Linear) and not isinstance(module, nn.LazyLinear):
            yield name, module, (module.in_features, module.out_features)
        elif _is_conv1d(module):
            yield name, module, tuple(module.weight.shape)
        elif isinstance(module, nn.MultiheadAttention):  # its out_proj is a linear layer
            for own, weight in module.named_parameters(prefix=name, recurse=False):
                if own.endswith("_weight"):
                    yield own, module, tuple(weight.shape[::-1])


def _adapters(names: Mapping[str, nn.Module]) -> set[int]:
    """Ids of modules that PEFT has put beside the layers that it wraps."""
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
    """Ids of the linear layers without a bias that project onto a vocabulary: as models of
    transformers say; in other models, by their width."""
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
    """Why a module may be something else than the linear layer that its class says."""
    kind, conv1d = type(module), _is_conv1d(module)
    if isinstance(module, nn.MultiheadAttention | NonDynamicallyQuantizableLinear):
        return IN_ATTENTION
    if kind is not nn.Linear and not conv1d:
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


def _shared(module: nn.Module, embeddings: Mapping[int, str]) -> str | None:
    embedding = embeddings.get(id(module.weight))
    if embedding is None:
        return None
    return f"shares its weight with the embedding {embedding} (tied=True converts it)"
