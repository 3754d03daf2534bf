"""The clips of a whole model: when they are measured."""

from collections.abc import Callable, Iterator

import torch
from fairseq.distributed import utils as distributed
from torch import nn

from lsq.layers import ProgramModule, quantized_tensors


def quantized_modules(model: nn.Module) -> Iterator[ProgramModule]:
    """Every module of `model` that quantises."""
    for module in model.modules():
        if isinstance(module, ProgramModule) and module.quant.quantized:
            yield module


def restart(model: nn.Module) -> None:
    """Measure the clips of all weights now, and those of activations on the next batch."""
    for module in quantized_modules(model):
        module.calibrate_weights()
        module.schedule.restart()


@torch.no_grad()
def together(model: nn.Module, run: Callable[[], object]) -> None:
    """Where clips are due to be measured, call `run`, a forward pass, and average them over the processes, all at once.

    One process alone measures its clips in its forward pass as it is, and this does nothing. Between measurements,
    the gradients that the processes share keep their clips equal.
    """
    group = distributed.get_data_parallel_group()
    processes = distributed.get_world_size(group)
    if processes == 1 or not any(module.calibration_due() for module in quantized_modules(model)):
        return
    run()
    clips = [clip.data for _, clip in quantized_tensors(model)]
    joined = torch.cat([clip.flatten() for clip in clips])
    distributed.all_reduce(joined, group)
    means = joined.div_(processes).split([clip.numel() for clip in clips])
    torch._foreach_copy_(clips, [mean.view_as(clip) for mean, clip in zip(means, clips, strict=True)])
