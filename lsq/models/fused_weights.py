"""Weights of a fused layer: parameters joined in memory, and rounded ones for its own code."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lsq.layers.in_place import InPlace
from lsq.layers.weight_state import rounded_values
from lsq.program.tensor import Kind, Parameter
from lsq.quant import WeightFormat
from lsq.quant.numbers import ScaledFormat
from lsq.run import shards
from lsq.run.parameter_state import Stamp


def lie_together(parts: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """Move parameters of equal width, such as queries, keys and values, into one block of memory.

    Each gets a storage of its own for its part: safetensors sees nothing shared. Returns the block,
    which the caller keeps as long as it is used. Returns None if nothing was moved: a parameter
    shares its memory, is no plain tensor or has no memory yet.
    """
    kinds = {(type(part), part.dtype, part.device, part.shape[1:]) for part in parts}
    if len(parts) < 2 or len(kinds) > 1 or len({id(part) for part in parts}) < len(parts):
        return None
    if type(parts[0]) is not nn.Parameter or parts[0].is_meta:
        return None
    if any(part.untyped_storage().nbytes() != part.numel() * part.element_size() for part in parts):
        return None
    if parts[0].device.type == "cpu" and any(part.is_shared() for part in parts):
        return None
    with torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, share in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = torch.from_dlpack(share)
    return whole


class Joined(torch.autograd.Function):
    """Join parts along their first dimension; without a copy if they lie in `whole`."""

    @staticmethod
    def forward(ctx, whole: torch.Tensor | None, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(part) for part in parts]
        return whole.detach() if whole is not None and _lie_in(whole, parts) else torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return None, *gradient.split(ctx.sizes)


def _lie_in(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if sum(map(len, parts)) != len(whole):
        return False
    return all(
        type(part) in (torch.Tensor, nn.Parameter)
        and part.data_ptr() == share.data_ptr()
        and (part.dtype, part.device, part.stride()) == (share.dtype, share.device, share.stride())
        for part, share in zip(parts, whole.split([len(part) for part in parts]), strict=True)
    )


class RoundedWeights:
    """The weights of one layer as its program rounds them; a copy of the layer makes its own."""

    def __init__(self):
        self.kept: dict[str, tuple[Stamp, torch.Tensor]] = {}
        """A program's weight -> stamp of its parameters, rounded weight."""
        self.lock = threading.RLock()

    def __reduce__(self):
        return RoundedWeights, ()

    @contextmanager
    def within(self, layer: InPlace, rows: int = 0) -> Iterator[None]:
        """Give inner modules of `layer` rounded, masked weights with straight-through gradients.

        Without gradients they are kept until a weight changes. Threads take turns.
        `rows`: see Stamp.holds.
        """
        if not _rounds(layer) and layer.weight_masks is None:
            yield
            return
        own = []
        with self.lock:
            try:
                for name, declared in layer.declared.items():
                    # codes alone decode to rounded values
                    if declared.kind is Kind.WEIGHT and not layer.is_coded(name):
                        own += self._swap(layer, name, declared, rows)
                yield
            finally:
                for holder, last, parameter in own:
                    holder._parameters[last] = parameter

    def _swap(
        self, layer: InPlace, name: str, declared: Parameter, rows: int
    ) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        parameters = layer.sources(name)
        clip = None
        if declared.clip is not None and _rounds(layer):
            clip = layer.own_parameter(declared.clip)
        made_from = parameters if clip is None else [*parameters, clip]
        stamp, rounded = self.kept.get(name, (None, None))
        if stamp is None or torch.is_grad_enabled() or not stamp.holds(made_from, rows=rows):
            rounded = layer.values_of(name)
            if clip is not None:
                form = layer.quant.weight_form(name)
                rounded = _straight_through(layer, rounded, clip, form, declared.in_out)
            if not torch.is_grad_enabled():
                self.kept[name] = Stamp(made_from), rounded
        sizes = [len(parameter) for parameter in parameters]
        for (_, module, last), part in zip(layer.holders(name), rounded.split(sizes), strict=True):
            yield module, last, module._parameters[last]
            module._parameters[last] = part


def _rounds(layer: InPlace) -> bool:
    return layer.quant.quantized and layer.schedule.begun and not layer.schedule.float_fallback


def _straight_through(
    layer: InPlace,
    weight: torch.Tensor,
    clip: torch.Tensor,
    form: WeightFormat | ScaledFormat,
    in_out: bool,
) -> torch.Tensor:
    with torch.no_grad():
        rows = weight.detach().float()
        rows = rows.t() if in_out else rows
        if not layer.quant.learned and not any(map(shards.is_shard, (clip, weight))):
            clip.data.copy_(form.measured_clips(rows, clip))  # the clip follows the weight
        rounded = rounded_values(rows, clip.detach(), form, layer.target)
        change = (rounded.t() if in_out else rounded).to(weight.dtype) - weight
    return weight + change
