"""Weights of a layer as its program rounds them, in their own places for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lsq.layers.weight_state import rounded_values
from lsq.program.parameters import Kind, Parameter
from lsq.quant import WeightFormat, largest_clips
from lsq.quant.numbers import ScaledFormat
from lsq.run import shards
from lsq.run.stamp import Stamp

if TYPE_CHECKING:
    from lsq.models.fused_layer import FusedLayer


class Rounded:
    """The rounded weights of one layer. A copy of a layer makes its own.

    Attributes:
        kept: names of a program's weights -> (what they were made of, the rounded ones).
        turn: of the thread whose pass has them in the places of the others.
    """

    def __init__(self):
        self.kept: dict[str, tuple[Stamp, torch.Tensor]] = {}
        self.turn = threading.RLock()

    def __reduce__(self):
        return Rounded, ()

    def clear(self) -> None:
        """They are of no use any more."""
        self.kept.clear()


@contextmanager
def rounded_weights(layer: FusedLayer, rows: int = 0) -> Iterator[None]:
    """Let the modules inside `layer` have rounded, masked weights, whose gradients go straight
    through to the others.

    Without gradients they are kept in `layer.rounded` until a weight changes: decoding takes them
    at every step.
    Threads wait for one another: who comes meanwhile would take rounded weights for the layer's
        own.

    `rows`: of the pass, see Stamp.holds.
    """
    if not _rounds(layer) and layer.weight_masks is None:
        yield
        return
    held = []
    with layer.rounded.turn:
        try:
            for name, declared in layer.declared.items():
                # else it reads as rounded
                if declared.kind is Kind.WEIGHT and not layer.is_coded(name):
                    held += _swap(layer, name, declared, rows)
            yield
        finally:
            for holder, last, parameter in held:
                holder._parameters[last] = parameter


def _rounds(layer: FusedLayer) -> bool:
    return layer.quant.quantized and layer.schedule.begun and not layer.schedule.float_fallback


def _swap(
    layer: FusedLayer, name: str, declared: Parameter, rows: int
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    parameters = layer.sources(name)
    clip = (
        layer.own_parameter(declared.clip) if declared.clip is not None and _rounds(layer) else None
    )
    made_from = parameters if clip is None else [*parameters, clip]
    stamp, rounded = layer.rounded.kept.get(name, (None, None))
    if stamp is None or torch.is_grad_enabled() or not stamp.holds(made_from, rows=rows):
        rounded = layer.values_of(name)
        if clip is not None:
            rounded = _as_rounded(
                layer, rounded, clip, layer.quant.weight_form(name), declared.in_out
            )
        if not torch.is_grad_enabled():
            layer.rounded.kept[name] = Stamp(made_from), rounded
    sizes = [len(parameter) for parameter in parameters]
    for (_, module, last), part in zip(layer.holders(name), rounded.split(sizes), strict=True):
        yield module, last, module._parameters[last]
        module._parameters[last] = part


def _as_rounded(
    layer: FusedLayer,
    weight: torch.Tensor,
    clip: torch.Tensor,
    form: WeightFormat | ScaledFormat,
    in_out: bool,
) -> torch.Tensor:
    with torch.no_grad():
        rows = weight.detach().float()
        rows = rows.t() if in_out else rows
        if not layer.quant.learned and not any(map(shards.is_shard, (clip, weight))):
            clip.data.copy_(largest_clips(rows, clip))  # the clip follows the weight
        seen = rounded_values(rows, clip.detach(), form, layer.target)
        change = (seen.t() if in_out else seen).to(weight.dtype) - weight
    return weight + change
