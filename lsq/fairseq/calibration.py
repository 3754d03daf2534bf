"""The clips of a whole model: when they are measured, and that no step of an optimizer takes them to 0."""

import logging
from collections.abc import Iterator

import torch
from fairseq.distributed import utils as distributed
from torch import nn

from lsq.layers import ProgramModule, quantized_tensors
from lsq.quant import SMALLEST_CLIP

logger = logging.getLogger(__name__)


def quantized_modules(model: nn.Module) -> Iterator[ProgramModule]:
    """Every module of `model` that quantises, those inside others too."""
    for module in model.modules():
        if isinstance(module, ProgramModule) and module.quant.quantized:
            yield module


def restart(model: nn.Module) -> None:
    """Measure the clips of all weights now, and those of activations on the next batch."""
    measured: set[int] = set()
    for module in quantized_modules(model):
        if id(module) not in measured:
            module.calibrate_weights()
            measured.update(map(id, module.modules()))
        module.calibrated.fill_(module.quant.activation_init == "fixed")


@torch.no_grad()
def together(model: nn.Module, *inputs: torch.Tensor) -> None:
    """Before the first update of several processes, run `model(*inputs)` once and average the clips over them.

    One process alone measures its clips in its first forward pass as it is, and this does nothing. Afterwards, the
    gradients that the processes share keep their clips equal.
    """
    group = distributed.get_data_parallel_group()
    processes = distributed.get_world_size(group)
    if processes == 1 or all(module.calibrated for module in quantized_modules(model)):
        return
    model.eval()
    model(*inputs)
    model.train()
    for _, clip in quantized_tensors(model):
        distributed.all_reduce(clip.data, group)
        clip.data.div_(processes)


@torch.no_grad()
def hold_above_zero(model: nn.Module, said: set[str]) -> None:
    """Raise every clip below SMALLEST_CLIP to it, in place. NaN stays, to be seen.

    A step of an optimizer is about as long as the learning rate, whatever it steps on, and may take a small clip
    across 0, where it would mean nothing. `said` gains the names of the tensors that were warned of; each is once.
    """
    clips = [clip.data for _, clip in quantized_tensors(model)]
    if not clips or not torch.cat(clips).lt(SMALLEST_CLIP).any():
        return
    for name, clip in quantized_tensors(model):
        if clip.lt(SMALLEST_CLIP).any():
            clip.data.clamp_(min=SMALLEST_CLIP)
            if name not in said:
                said.add(name)
                logger.warning(
                    "%s: the optimizer took a clip to 0 or below; it is held just above 0, which makes what it clips "
                    "0 as well, and may grow again. If many tensors are affected, lower the learning rate.",
                    name,
                )
