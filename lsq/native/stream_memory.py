"""Memory that the work of one stream shares: what kernels and products need for a moment, one after
another."""

import contextlib
import functools

import torch

from lsq.native.launch import TICKETS

WORKSPACE_ALIGNMENT = 256


class StreamMemory:
    """The workspace of products, and words for tickets, which every kernel finds and leaves at
    zero.

    Args:
        place: where.
        workspace_bytes: size of the workspace.
    """

    def __init__(self, place: torch.device, workspace_bytes: int):
        self.place = place
        self.workspace = aligned_workspace(workspace_bytes, place)

    @functools.cached_property
    def ticket(self) -> torch.Tensor:
        """Made when a list first takes one: to fill it is a launch, which a capture would keep."""
        return torch.zeros(TICKETS, dtype=torch.int32, device=self.place)

    def grow(self, workspace_bytes: int) -> None:
        """Make room for a larger workspace.

        The stream is current: PyTorch reuses the old one after its work.
        """
        if self.workspace.numel() < workspace_bytes:
            self.workspace = aligned_workspace(workspace_bytes, self.place)

    def clear(self) -> None:
        """A kernel that did not finish leaves its ticket as it is."""
        with contextlib.suppress(RuntimeError):  # a GPU whose context is lost takes no more work
            self.ticket.zero_()


def aligned_workspace(size: int, place: torch.device) -> torch.Tensor:
    """uint8 [size] on a device that begins at a multiple of WORKSPACE_ALIGNMENT, as cuBLASLt wants
    its workspace."""
    whole = torch.empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=place)
    first = -whole.data_ptr() % WORKSPACE_ALIGNMENT
    return whole[first : first + size]
