"""Notices an optimizer that was made before `convert`: clips that learn are not among its
parameters."""

import gc
import logging
import weakref

from torch import nn
from torch.optim import Optimizer

from lsq.layers.statistics import quantized_tensors
from lsq.run.parameter_state import steps

logger = logging.getLogger(__name__)


def watch(model: nn.Module) -> None:
    """Look at the first optimizer that steps `model`, and warn if no optimizer has its clips.

    Weights are the same parameters as before, so that nothing else is lost.
    """
    kept = weakref.ref(model)

    def look(optimizer: Optimizer) -> None:
        model = kept()
        if model is not None and _parameters(optimizer).isdisjoint(map(id, model.parameters())):
            return  # it is another model's
        steps.before.remove(look)
        clips = (
            {id(clip) for _, clip in quantized_tensors(model) if clip.requires_grad}
            if model is not None
            else ()
        )
        if clips and not any(clips & _parameters(one) for one in _optimizers()):
            logger.warning(
                "no optimizer has the %d clips of this %s, so that they do not learn: it was made"
                " before lsq.convert; "
                "make the optimizer, or the Trainer, afterwards",
                len(clips),
                type(model).__name__,
            )

    steps.before.append(look)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _optimizers() -> list[Optimizer]:
    """All that there are: clips may have one of their own."""
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), Optimizer) and hasattr(one, "param_groups")
    ]
