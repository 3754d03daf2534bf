"""The collectives that exchanges are made of, under the name that the PyTorch at hand has for them."""

from torch import Tensor, distributed
from torch.distributed import ProcessGroup

# PyTorch 2.13 renamed the function; the old name warns there, and the new one is missing before.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def all_gather(out: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Write what each of N workers has, `own` of n elements, to `out` of N * n, in order of ranks; both contiguous."""
    _all_gather(out.view(-1), own.view(-1), group=group)


def all_to_all(
    out: Tensor, given: Tensor, group: ProcessGroup, received: list[int] | None = None, sent: list[int] | None = None
) -> None:
    """Send each worker its part of `given` and write what all sent here to `out`, in order of ranks; both contiguous.

    Args:
        received: elements that come from each worker; None: as many from each.
        sent: elements that go to each worker; None: as many to each.
    """
    distributed.all_to_all_single(out.view(-1), given.view(-1), received, sent, group=group)
