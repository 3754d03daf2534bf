"""Which whole layers of a model become one program each."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lsq.config import QuantConfig
from lsq.layers.in_place import InPlace
from lsq.models.architectures.known import fused_class
from lsq.models.report import Layer, Whole
from lsq.models.selection import FLOAT_MODE, IN_ATTENTION, Choice


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A layer that a program is known for, and whether it becomes one."""

    module: nn.Module
    kind: type[InPlace]
    whole: Whole
    linears: frozenset[str]
    """Names of the linear layers in it."""


def fusions(model: nn.Module, quant: QuantConfig, choices: Sequence[Choice]) -> list[Fusion]:
    """Every layer of `model` of a class that there is a program for: all its linear layers must be
    chosen.

    `choices`: whatever the widths are, which a whole layer gains with.
    """
    found = []
    for name, module in model.named_modules():
        kind = fused_class(module)
        if kind is None:
            continue
        prefix = f"{name}." if name else ""
        inside = [choice.layer for choice in choices if choice.layer.name.startswith(prefix)]
        whole = Whole(
            name=name,
            kind=type(module).__name__,
            reason=_reason(module, kind, quant, inside, prefix),
        )
        linears = frozenset(one.name for one in inside if not one.adapter)
        found.append(Fusion(module=module, kind=kind, whole=whole, linears=linears))
    return found


def of_transformers(model: nn.Module) -> bool:
    """Whether a module in it is one of Hugging Face's transformers, which is not lsq's already."""
    return any(
        type(module).__module__.startswith("transformers.models.") for module in model.modules()
    ) and not any(isinstance(module, InPlace) for module in model.modules())


def told(choices: Sequence[Choice], whole: Sequence[Fusion]) -> tuple[Layer, ...]:
    """Every linear layer with the fused one that it is in."""
    within = {
        name: one.whole.name for one in whole if one.whole.reason is None for name in one.linears
    }
    return tuple(
        dataclasses.replace(choice.layer, within=within[choice.layer.name], reason=None)
        if choice.layer.name in within
        else choice.layer
        for choice in choices
    )


FUSED = "Fused"
"""With which names of fused layers' classes begin."""
UNDIVIDED = "_no_split_modules"
"""What models of transformers call the names of the classes that accelerate and others wrap one by
one."""


def name_classes(model: nn.Module) -> None:
    """Let these name the classes of layers that there are now: fused ones, beside the others or in
    their place."""
    for module in model.modules():
        listed = getattr(module, UNDIVIDED, None)
        if listed:
            plain = {name.removeprefix(FUSED) for name in listed}
            kinds = {type(one) for one in module.modules()}
            fused = {
                kind.__name__
                for kind in kinds
                if issubclass(kind, InPlace) and kind.float_class.__name__ in plain
            }
            left = {name for name in plain if FUSED + name not in fused} | {
                kind.__name__ for kind in kinds
            } & plain
            setattr(module, UNDIVIDED, type(listed)(sorted(fused | left)))


def _reason(
    module: nn.Module, kind: type[InPlace], quant: QuantConfig, inside: Sequence[Layer], prefix: str
) -> str | None:
    fine = None, FLOAT_MODE, IN_ATTENTION
    left = [one for one in inside if one.reason not in fine and not one.adapter]
    if left:
        # for the reason that stands beside its name
        return f"its {left[0].name.removeprefix(prefix)} is left"
    try:
        kind.check(module)
        kind.config_of(module, quant)
    except ValueError as error:
        return str(error)
