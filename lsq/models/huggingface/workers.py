"""Clips that all workers of a data parallel training share, as they share gradients."""

from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lsq.dist import replicas


def average_clips(model: nn.Module, group: ProcessGroup | None = None) -> RemovableHandle:
    """From now on, average the clips that training passes of `model` measure over the workers,
    before optimizers step.

    Under DistributedDataParallel and FSDP2 this happens by itself; call it in every process where
    something else makes gradients equal. Between measurements, the gradients that the workers share
    keep clips equal.

    Args:
        model: converted, and not wrapped.
        group: of the workers; None: all processes.

    Returns:
        Its `remove()` ends it.

    Raises:
        ValueError: there is no process group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "there is one process; average_clips is for several, after init_process_group"
        )
    return replicas.share(model, group)
