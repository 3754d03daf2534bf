"""Clips that all workers of a data parallel training share, as they share gradients."""

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lsq.dist.collectives import average
from lsq.layers import ProgramModule, quantized_tensors


def average_clips(model: nn.Module, group: ProcessGroup | None = None) -> RemovableHandle:
    """From now on, average the clips that training passes of `model` measure over the workers.

    Each worker would measure them on its own batch. Before a pass that would (the first, 2, 4, 8, ...), the model runs
    once more on its batch, without gradients; then the clips are averaged, and the pass itself measures nothing.
    Between those, the gradients that the workers share keep clips equal.

    Args:
        model: what DistributedDataParallel wraps, converted. Call it in every process.
        group: of the workers; None: all processes.

    Returns:
        Its `remove()` ends it.

    Raises:
        ValueError: there is no process group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("there is one process; average_clips is for several, after init_process_group")
    modules = [one for one in model.modules() if isinstance(one, ProgramModule) and one.quant.quantized]

    @torch.no_grad()
    def measure(module: nn.Module, inputs: tuple, named: dict) -> None:
        if module.training and any(one.calibration_due() for one in modules):
            module.forward(*inputs, **named)
            average([clip.data for _, clip in quantized_tensors(module)], group)

    return model.register_forward_pre_hook(measure, with_kwargs=True)
