"""The clips of a whole model: when they are measured."""

from collections.abc import Iterator

from fairseq.distributed import utils as distributed
from torch import nn

from lsq.dist import replicas
from lsq.layers import ProgramModule


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


def share(model: nn.Module) -> None:
    """Average the clips that the processes of a training measure, whatever wraps the model
    (lsq.dist.replicas)."""
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) > 1:
        replicas.share(model, group)
