"""LoRA adapters (Hu et al. 2022) of PEFT in a fused layer, whose program adds them to products."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lsq.config import Adapter
from lsq.models.exact import altered, base_of, is_lora, module_at

DOWN, UP = "adapter_down", "adapter_up"
"""Endings of the names of adapters' parameters in a program, in place of "weight"."""
DROPOUTS = nn.Dropout, nn.Identity
"""Classes of the module that PEFT puts before an adapter, with a dropout and without."""


class Block(NamedTuple):
    """The position of an adapter: it adds to outputs of a weight from `first` on, by `scaling`."""

    first: int
    scaling: float


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The adapters of a layer."""

    adapters: tuple[Adapter, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter of an adapter in a program -> paths of the layer's parameters that it joins."""
    blocks: Mapping[str, tuple[int, tuple[Block, ...]]] = field(default_factory=dict)
    """Parameter that joins `lora_B`s -> outputs of the weight, and a Block for each `lora_B`."""


class _Active(NamedTuple):
    path: str
    module: nn.Module
    name: str
    block: Block


def adapted(layer: nn.Module, sources: Mapping[str, tuple[str, ...]]) -> Adapted:
    """Read the active adapters of `layer`; raises ValueError if no program has such adapters.

    `sources`: a program's parameters -> paths of the layer's parameters, without adapters.
    """
    adapters, joined, blocks = [], {}, {}
    for name, paths in sources.items():
        active, outputs = _active(layer, paths) if name.endswith("_weight") else ([], 0)
        if not active:
            continue
        dropouts = {getattr(one.module.lora_dropout[one.name], "p", 0.0) for one in active}
        if len(dropouts) > 1:
            where = ", ".join(dict.fromkeys(one.path for one in active))
            raise ValueError(f"adapters of its {where} have different dropouts: {sorted(dropouts)}")
        # PEFT may pad adapters beyond their `r`.
        rank = sum(len(one.module.lora_A[one.name].weight) for one in active)
        adapters.append(Adapter(weight=name, rank=rank, dropout=dropouts.pop()))
        prefix = name.removesuffix("weight")
        for end, matrix in ((DOWN, "lora_A"), (UP, "lora_B")):
            joined[prefix + end] = tuple(f"{one.path}.{matrix}.{one.name}.weight" for one in active)
        blocks[prefix + UP] = outputs, tuple(one.block for one in active)
    return Adapted(adapters=tuple(adapters), sources=joined, blocks=blocks)


def block_matrix(parts: Sequence[torch.Tensor], blocks: Sequence[Block], rows: int) -> torch.Tensor:
    """Build [rows, sum of ranks]: scaled `parts` [outputs, rank] in their blocks, else zeros."""
    return torch.cat(
        [
            functional.pad(part * at.scaling, (0, 0, at.first, rows - at.first - len(part)))
            for part, at in zip(parts, blocks, strict=True)
        ],
        dim=1,
    )


def _active(layer: nn.Module, paths: tuple[str, ...]) -> tuple[list[_Active], int]:
    active, outputs = [], 0
    for path in paths:
        inside, _, last = path.rpartition(".")
        module = module_at(layer, inside)
        for name in _active_names(module) if is_lora(module) else ():
            active.append(_Active(inside, module, name, Block(outputs, module.scaling[name])))
        parameter = None if module is None else base_of(module)._parameters.get(last)
        if parameter is not None:  # a missing parameter is refused elsewhere
            outputs += parameter.shape[int(is_lora(module) and module.fan_in_fan_out)]
    return active, outputs


def _active_names(module: nn.Module) -> list[str]:
    """Return the names of the adapters that a layer now adds; ValueError for unusual ones."""
    _refuse(altered(module))  # PEFT's `adapter_names` puts a hook there
    if module.disable_adapters and module.merged:
        raise ValueError("its adapters are merged and switched off")  # PEFT would unmerge them
    if module.disable_adapters or module.merged:
        return []
    names = [name for name in module.active_adapters if name in module.lora_A]
    for name in names:
        if name in getattr(module, "lora_variant", {}):
            raise ValueError(f"its adapter is a {type(module.lora_variant[name]).__name__}")
        down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        _refuse("a bias" if module.lora_bias.get(name) else None)
        for part, kinds in ((down, (nn.Linear,)), (up, (nn.Linear,)), (dropout, DROPOUTS)):
            _refuse(altered(part) if type(part) in kinds else f"a {type(part).__name__}")
        _refuse("a bias" if down.bias is not None or up.bias is not None else None)
        if dropout.training is not module.training:
            raise ValueError("its adapter's dropout is not in the mode of the layer around it")
    return names


def _refuse(fault: str | None) -> None:
    if fault:
        raise ValueError(f"its adapter has {fault}")
