"""Which layers of a model `convert` takes, and why it leaves the others."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lsq.config import DIMENSION_MULTIPLE, QuantConfig
from lsq.layers.in_place import InPlace
from lsq.layers.linear import Projection
from lsq.models.exact import patched
from lsq.models.report import Layer, Stack
from lsq.quant.choices import format_choice

Skip = str | Iterable[str] | Callable[[nn.Module, str], bool]
"""Names or patterns of modules to leave as they are, or a function of a linear layer and its name
that says so."""
FLOAT_MODE = "mode is 'float', in which nothing is rounded"
"""Why linear layers stay, but not whole ones."""
IN_ATTENTION = "is of a torch.nn.MultiheadAttention, which multiplies by itself"
"""Why its weights stay where no whole layer around it is known."""
VOCABULARY = 8192
"""Outputs from which on a layer may be taken for a projection onto a vocabulary."""
SHOWN = 8
"""Names in a message, at most."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A linear layer of a model, and what is to become of it."""

    module: nn.Module
    layer: Layer


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the Conv1D of transformers, which GPT-2 has: a linear layer with a weight
    [inputs, outputs]."""
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nx")
        and _is_matrix(getattr(module, "weight", None))
    )


def choose(
    model: nn.Module,
    quant: QuantConfig,
    skip: Skip,
    *,
    minimum_width: int,
    tied: bool,
    heads: bool = False,
) -> list[Choice]:
    """Every linear layer in `model`.

    Args:
        model: whose.
        quant: what they would become.
        skip, minimum_width, tied: see lsq.convert.
        heads: projections onto a vocabulary become heads, whose width may be any.

    Raises:
        ValueError: a pattern in `skip` fits no module.
    """
    names = {name: module for name, module in model.named_modules()}
    skips = skipping(skip, names)
    embeddings = {
        id(module.weight): name
        for name, module in names.items()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    inside = {
        id(part) for one in names.values() if isinstance(one, InPlace) for part in one.modules()
    }
    adapters = _adapters(names)
    whole_tiles = quant.coded or quant.formats_differ
    found = _heads(names) if heads and not _packed(quant) else set()
    return [
        Choice(
            module=module,
            layer=Layer(
                name=name,
                inputs=inputs,
                outputs=outputs,
                reason=reason,
                head=reason is None and id(module) in found,
                adapter=id(module) in adapters,
            ),
        )
        for name, module, (inputs, outputs) in _linears(names)
        for reason in [
            ("is lsq's already" if id(module) in inside and id(module) not in adapters else None)
            or ("skip names it" if skips(module, name) else None)
            or (None if quant.quantized else FLOAT_MODE)
            or _unusual(module, quant)
            or _unfit(
                inputs, inputs if id(module) in found else outputs, minimum_width, whole_tiles
            )
            or (None if tied or id(module) in found else _shared(module, embeddings))
        ]
    ]


def stacks_of(model: nn.Module, minimum_width: int) -> tuple[Stack, ...]:
    """Parameters [layers, ...] that are wide enough to be weights of several linear layers, as of
    experts.

    Those of PyTorch's own modules, such as convolutions, are something else.
    """
    return tuple(
        Stack(name=f"{prefix}.{name}" if prefix else name, shape=tuple(one.shape))
        for prefix, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, one in module.named_parameters(recurse=False)
        if one.dim() == 3 and len(one) > 1 and min(one.shape[1:]) >= minimum_width
    )


def _linears(names: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
    for name, module in names.items():
        if isinstance(module, Projection):
            yield name, module, module.sizes
        elif isinstance(module, nn.Linear) and not isinstance(module, nn.LazyLinear):
            yield name, module, (module.in_features, module.out_features)
        elif is_conv1d(module):
            yield name, module, tuple(module.weight.shape)
        elif isinstance(module, nn.MultiheadAttention):  # its out_proj is a linear layer
            for own, weight in module.named_parameters(prefix=name, recurse=False):
                if own.endswith("_weight"):
                    yield own, module, tuple(weight.shape[::-1])


def _adapters(names: dict[str, nn.Module]) -> set[int]:
    """What PEFT has put beside the layers that it wraps."""
    wraps = [
        one
        for one in names.values()
        if type(one).__module__.startswith("peft.") and hasattr(one, "base_layer")
    ]
    return {
        id(part) for one in wraps for part in set(one.modules()) - set(one.base_layer.modules())
    }


def _heads(names: dict[str, nn.Module]) -> set[int]:
    """Of the linear layers without a bias those that project onto a vocabulary: what models of
    transformers say is one; in other models, what is as wide as one.
    """
    asked = [module for module in names.values() if hasattr(module, "get_output_embeddings")]
    found = [module.get_output_embeddings() for module in asked] or [
        module
        for module in names.values()
        if type(module) is nn.Linear
        and module.out_features >= max(VOCABULARY, 6 * module.in_features)
    ]
    return {id(one) for one in found if type(one) is nn.Linear and one.bias is None}


def _packed(quant: QuantConfig) -> bool:
    """Whether a weight may be stored as int4; formats such as int4/row are decoded."""
    return "int4" in format_choice(quant.weight_format).formats


def _unusual(module: nn.Module, quant: QuantConfig) -> str | None:
    """What makes another linear layer of a module that is called so."""
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention | NonDynamicallyQuantizableLinear):
        return IN_ATTENTION
    if kind is not nn.Linear and not is_conv1d(module):
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
    sizes = (
        (module.nx, module.nf) if is_conv1d(module) else (module.out_features, module.in_features)
    )
    if tuple(module.weight.shape) != sizes:
        return f"has a weight {list(module.weight.shape)} in the place of {list(sizes)}"
    bias = parameters.get("bias")
    if bias is not None and (
        bias.dtype not in DTYPES or bias.shape != (module.nf if is_conv1d(module) else sizes[0],)
    ):
        return f"has a bias of {bias.dtype} {list(bias.shape)}"
    if is_conv1d(module) and _packed(quant):
        return "has a weight [inputs, outputs], which int4 does not store"
    return None


def _unfit(inputs: int, outputs: int, minimum_width: int, whole_tiles: bool) -> str | None:
    for name, width in (("inputs", inputs), ("outputs", outputs)):
        if width < minimum_width:
            return f"{width} {name}: narrower than {minimum_width} gains nothing (minimum_width)"
        if whole_tiles and width % DIMENSION_MULTIPLE:
            return f"{width} {name}: int8 products need a multiple of {DIMENSION_MULTIPLE}"
    return None


def _shared(module: nn.Module, embeddings: dict[int, str]) -> str | None:
    embedding = embeddings.get(id(module.weight))
    return (
        None
        if embedding is None
        else f"shares its weight with the embedding {embedding} (tied=True converts it)"
    )


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 2


def skipping(skip: Skip, names: dict[str, nn.Module]) -> Callable[[nn.Module, str], bool]:
    """Whether a module of that name, one of `names`, is to be left as it is.

    Raises:
        ValueError: a pattern in `skip` fits no module.
    """
    if callable(skip):
        return skip
    patterns = [skip] if isinstance(skip, str) else list(skip)
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            near = difflib.get_close_matches(
                pattern, {part for name in names for part in _ends(name)}, n=3
            )
            ends = sorted({name.rpartition(".")[2] for name in names if name})[:SHOWN]
            hint = (
                f"; near are {', '.join(near)}"
                if near
                else f"; there are {', '.join(ends)}"
                if ends
                else ""
            )
            raise ValueError(
                f"skip names {pattern!r}, but no module of this model is called so{hint}"
            )
    return lambda module, name: any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    """Whether a module or one around it has that name, or ends so from a dot on."""
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(end, pattern) for one in around for end in _ends(one))


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
