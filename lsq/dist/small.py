"""Gradients of small tensors travel as floats beside the codes of the others.

A clip of one number lies in a block with gradients of weights that may be hundreds of times as
large: rounded under their scale it would often be zero. The bytes of floats do not count for
    tensors of so few values.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

LEAST_CODED = 16
"""Tensors of fewer values travel as floats."""


def small_places(tensors: Iterable[tuple[int, int]], device: torch.device) -> Tensor | None:
    """The places int64 of the values of small tensors in a buffer; None: there is none.

    Args:
        tensors: (values of a tensor, how many values of the buffer are its own), in the order of
            the buffer.
        device: of the buffer.
    """
    runs, first = [], 0
    for values, length in tensors:
        if values < LEAST_CODED:
            runs.append((first, first + length))
        first += length
    # Made where they are used: a copy from the host would wait.
    return torch.cat([torch.arange(*run, device=device) for run in runs]) if runs else None


def take_out(buffer: Tensor, places: Tensor) -> Tensor:
    """The values float32 at `places` of the last dimension of `buffer`, where they become zero."""
    values = buffer.index_select(-1, places).float()
    buffer.index_fill_(-1, places, 0.0)
    return values
