"""Collectives under the names of the installed PyTorch, memory for messages, and small tensors.

Gradients of small tensors travel as floats beside the codes of all others. A clip of one number
lies in a block with gradients of weights that may be hundreds of times as large: rounded under
their scale, its gradient would often be zero.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

# PyTorch 2.13 renamed the function; the old name warns there, and the new one is missing before.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

LEAST_CODED = 16
"""Tensors with fewer values travel as floats."""


def all_gather(out: Tensor, own: Tensor, group: ProcessGroup) -> Work:
    """Write the `own` tensors of N workers, n elements each, to `out` of N * n elements, in order
    of ranks; both contiguous. Return the Work to wait for; a GPU's stream waits, not the host."""
    return _all_gather(out.view(-1), own.view(-1), group=group, async_op=True)


def all_to_all(
    out: Tensor,
    given: Tensor,
    group: ProcessGroup,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> Work:
    """Send each worker its part of `given`, and write the parts that all workers sent here to
    `out`, in order of ranks; both are contiguous. `received`, `sent`: elements from and to each
    worker; None: equal parts. Returns as `all_gather`."""
    return distributed.all_to_all_single(
        out.view(-1), given.view(-1), received, sent, group=group, async_op=True
    )


@torch.no_grad()
def average(tensors: list[Tensor], group: ProcessGroup | None) -> None:
    """Replace tensors of one dtype and device by their means over the workers, in one exchange."""
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(joined, group=group)
    means = joined.div_(distributed.get_world_size(group)).split(list(map(Tensor.numel, tensors)))
    torch._foreach_copy_(
        tensors, [mean.view_as(tensor) for mean, tensor in zip(means, tensors, strict=True)]
    )


class Scratch:
    """Named pieces of memory that grow, shared by all buckets: exchanges run one after another."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pieces: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return a contiguous, uninitialised tensor; the last one of this name becomes invalid."""
        size = math.prod(shape) * dtype.itemsize
        piece = self._pieces.get(name)
        if piece is None or piece.numel() < size:
            piece = self._pieces[name] = torch.empty(
                max(size, 16), dtype=torch.uint8, device=self.device
            )
        return piece[:size].view(dtype).view(shape)


def small_positions(tensors: Iterable[tuple[int, int]], device: torch.device) -> Tensor | None:
    """Return the positions int64 of small tensors' values in a buffer; None: there are none.
    `tensors`: (values of a tensor, its values in the buffer, padding included), in order."""
    runs, first = [], 0
    for values, length in tensors:
        if values < LEAST_CODED:
            runs.append((first, first + length))
        first += length
    # Made on the device: a copy from the host would wait.
    return torch.cat([torch.arange(*run, device=device) for run in runs]) if runs else None


def take_out(buffer: Tensor, positions: Tensor) -> Tensor:
    """Return the values float32 at `positions` of the last dimension of `buffer`; zero them
    there."""
    values = buffer.index_select(-1, positions).float()
    buffer.index_fill_(-1, positions, 0.0)
    return values
