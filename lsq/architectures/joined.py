"""Several parameters as one, such as queries, keys and values: without a copy, where they lie one after another."""

from collections.abc import Sequence

import torch
from torch import nn


def lie_together(parts: Sequence[nn.Parameter]) -> None:
    """Move parameters of the same width into one piece of memory, as torch.nn.RNN does with its own.

    What shares its memory with others, is no plain tensor or has none yet, stays where it is.
    """
    if len(parts) < 2 or len({(type(part), part.dtype, part.device, part.shape[1:]) for part in parts}) > 1:
        return
    if type(parts[0]) is not nn.Parameter or parts[0].is_meta or len({id(part) for part in parts}) < len(parts):
        return
    if any(part.untyped_storage().nbytes() != part.numel() * part.element_size() for part in parts):
        return
    with torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = place


class Joined(torch.autograd.Function):
    """parts [N1, ...], [N2, ...], ... -> [N1 + N2 + ..., ...]."""

    @staticmethod
    def forward(ctx, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(part) for part in parts]
        return _view(parts) if _adjacent(parts) else torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.split(ctx.sizes)


def _adjacent(parts: Sequence[torch.Tensor]) -> bool:
    if not all(type(part) in (torch.Tensor, nn.Parameter) and part.is_contiguous() for part in parts):
        return False
    address, storage = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.untyped_storage().data_ptr() != storage or part.dtype != parts[0].dtype:
            return False
        address += part.numel() * part.element_size()
    return True


def _view(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0].detach()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
