"""LoRA adapters of PEFT in a fused layer (Hu et al. 2022): its program adds them to int8
products."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from lsq.config import Adapter
from lsq.models.exact import altered, base_of, is_lora

DOWN, UP = "adapter_down", "adapter_up"
"""How the names of their parameters in a program end, in the place of "weight"."""

DROPOUTS = nn.Dropout, nn.Identity
"""What PEFT puts before an adapter, with a dropout and without one."""


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The adapters of a layer."""

    adapters: tuple[Adapter, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of their parameters in a program -> those of the layer that these are made of."""
    blocks: Mapping[str, tuple["Block", ...]] = field(default_factory=dict)
    """Names of those of a program's parameters that join `lora_B` -> where each adds to it."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Names of these -> outputs of the weight."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One adapter of a weight."""

    first: int
    """Of the weight's outputs, the first one that it adds to."""
    scaling: float


def adapted(layer: nn.Module, sources: Mapping[str, tuple[str, ...]]) -> Adapted:
    """Read the adapters that are active in `layer` now.

    Args:
        layer: of a model, or a fused one.
        sources: names of a program's parameters -> paths of those of the layer without adapters.

    Raises:
        ValueError: adapters that no program has.
    """
    adapters, found, blocks, rows = [], {}, {}, {}
    for name, paths in sources.items():
        active, outputs = _active(layer, paths) if name.endswith("_weight") else ([], 0)
        if active:
            prefix = name.removesuffix("weight")
            adapters.append(_joined(name, active))
            found[prefix + DOWN] = tuple(f"{one.path}.lora_A.{one.name}.weight" for one in active)
            found[prefix + UP] = tuple(f"{one.path}.lora_B.{one.name}.weight" for one in active)
            blocks[prefix + UP] = tuple(one.block for one in active)
            rows[prefix + UP] = outputs
    return Adapted(adapters=tuple(adapters), sources=found, blocks=blocks, rows=rows)


def block_matrix(parts: Sequence[torch.Tensor], blocks: Sequence[Block], rows: int) -> torch.Tensor:
    """[rows, sum of ranks] with each of `parts` [outputs, rank] times its scaling in its place,
    else 0."""
    return torch.cat(
        [
            functional.pad(part * at.scaling, (0, 0, at.first, rows - at.first - len(part)))
            for part, at in zip(parts, blocks, strict=True)
        ],
        dim=1,
    )


@dataclass(frozen=True, kw_only=True)
class _Active:
    path: str
    module: nn.Module
    name: str
    block: Block


def _module(layer: nn.Module, path: str) -> nn.Module | None:
    for part in path.split("."):
        layer = None if layer is None else layer._modules.get(part)
    return layer


def _active(layer: nn.Module, paths: tuple[str, ...]) -> tuple[list[_Active], int]:
    """The adapters of a weight that is made of the parameters at `paths`, and its outputs."""
    found, outputs = [], 0
    for path in paths:
        holder, _, last = path.rpartition(".")
        module = _module(layer, holder)
        for name in _active_names(module) if is_lora(module) else ():
            block = Block(first=outputs, scaling=module.scaling[name])
            found.append(_Active(path=holder, module=module, name=name, block=block))
        parameter = None if module is None else base_of(module)._parameters.get(last)
        if parameter is not None:  # what is not there is refused elsewhere
            outputs += parameter.shape[int(is_lora(module) and module.fan_in_fan_out)]
    return found, outputs


def _active_names(module: nn.Module) -> list[str]:
    """Return the adapters that a layer adds now; without any, it is its base alone."""
    _refuse(altered(module))  # PEFT's `adapter_names` puts a hook there
    if module.disable_adapters and module.merged:
        raise ValueError("its adapters are merged and switched off")  # PEFT's code unmerges them
    if module.disable_adapters or module.merged:
        return []
    names = [name for name in module.active_adapters if name in module.lora_A]
    for name in names:
        if name in getattr(module, "lora_variant", {}):
            raise ValueError(f"its adapter is a {type(module.lora_variant[name]).__name__}")
        if module.lora_bias.get(name):
            raise ValueError("its adapter has a bias")
        down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        for one, kinds in ((down, (nn.Linear,)), (up, (nn.Linear,)), (dropout, DROPOUTS)):
            _refuse(altered(one) if type(one) in kinds else f"a {type(one).__name__}")
        if down.bias is not None or up.bias is not None:
            raise ValueError("its adapter has a bias")
        if dropout.training is not module.training:
            raise ValueError("its adapter's dropout is not in the mode of the layer around it")
    return names


def _refuse(found: str | None) -> None:
    """Raise ValueError if something was found."""
    if found:
        raise ValueError(f"its adapter has {found}")


def _joined(weight: str, active: list[_Active]) -> Adapter:
    dropouts = {getattr(one.module.lora_dropout[one.name], "p", 0.0) for one in active}
    if len(dropouts) > 1:
        paths = ", ".join(dict.fromkeys(one.path for one in active))
        raise ValueError(f"adapters of its {paths} have different dropouts: {sorted(dropouts)}")
    # PEFT may pad adapters beyond their `r`.
    rank = sum(len(one.module.lora_A[one.name].weight) for one in active)
    return Adapter(weight=weight, rank=rank, dropout=dropouts.pop())
