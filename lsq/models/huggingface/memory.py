"""Planned memory in a Trainer: of the layers that are lsq's; and what others keep beside it."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lsq.layers.memory import plan_memory
from lsq.native import loader
from lsq.run.planned import StepMemory

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


def plan_batch(
    trainer: "Trainer", batch: Mapping[str, torch.Tensor], mode: str
) -> StepMemory | None:
    """Plan the memory of lsq's layers for a trainer's step on `batch`, and log what stays outside
    of it.

    Raises:
        ValueError: such a step cannot be planned; see lsq.layers.memory.plan_memory.
    """
    model, inputs = trainer.model, trainer._prepare_inputs(dict(batch))
    training = model.training

    def step() -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs)

    try:
        memory = plan_memory(model.train(), step, mode=mode)
    finally:
        model.train(training)
    if memory is None:
        logger.info(
            "memory is not planned: %s",
            "memory='naive'" if mode == "naive" else loader.description(),
        )
    else:
        logger.info("memory (%s): %s", mode, memory)
    return memory
