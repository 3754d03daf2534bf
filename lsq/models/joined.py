"""Several parameters as one, such as queries, keys and values: without a copy, where they lie one
after another."""

from collections.abc import Sequence

import torch
from torch import nn


def lie_together(parts: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """Move parameters of the same width into one piece of memory, as torch.nn.RNN does with its
    own.

    Each has a storage of its own for its share of it, so that safetensors and others see nothing
    shared.

    Returns:
        The whole, to be kept as long as they lie there; None where they stay as they are: what
        shares its memory with others or with other processes, is no plain tensor or has no memory
        yet.
    """
    if (
        len(parts) < 2
        or len({(type(part), part.dtype, part.device, part.shape[1:]) for part in parts}) > 1
    ):
        return None
    if (
        type(parts[0]) is not nn.Parameter
        or parts[0].is_meta
        or len({id(part) for part in parts}) < len(parts)
    ):
        return None
    if any(part.untyped_storage().nbytes() != part.numel() * part.element_size() for part in parts):
        return None
    if parts[0].device.type == "cpu" and any(part.is_shared() for part in parts):
        return None
    with torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = torch.from_dlpack(place)
    return whole


class Joined(torch.autograd.Function):
    """parts [N1, ...], [N2, ...], ... -> [N1 + N2 + ..., ...]; `whole`: where they lay together, if
    they ever did."""

    @staticmethod
    def forward(ctx, whole: torch.Tensor | None, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(part) for part in parts]
        return whole.detach() if whole is not None and _lie_in(whole, parts) else torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return None, *gradient.split(ctx.sizes)


def _lie_in(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    places = (
        whole.split([len(part) for part in parts]) if sum(map(len, parts)) == len(whole) else ()
    )
    return len(places) == len(parts) and all(
        type(part) in (torch.Tensor, nn.Parameter)
        and part.data_ptr() == place.data_ptr()
        and (part.dtype, part.device, part.stride()) == (place.dtype, place.device, place.stride())
        for part, place in zip(parts, places, strict=True)
    )
