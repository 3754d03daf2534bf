"""Planned memory in a Trainer: of the layers that are lsq's; and what others keep beside it."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lsq.csrc import loader
from lsq.layers.memory import plan_memory
from lsq.program.frames import StepMemory

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)
MOST = 5
"""Classes of modules that are named."""


def plan_batch(trainer: "Trainer", batch: Mapping[str, torch.Tensor], mode: str) -> StepMemory | None:
    """Plan the memory of lsq's layers for a trainer's step on `batch`, and log what stays outside of it.

    Raises:
        ValueError: such a step cannot be planned; see lsq.layers.memory.plan_memory.
    """
    model = trainer.model
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "gradient checkpointing runs layers again in the backward pass, which cannot be planned; leave it out, or "
            "largest_batch of LsqCallback"
        )
    inputs = trainer._prepare_inputs(dict(batch))
    training, outside = model.training, Counter()

    def step() -> torch.Tensor:
        with counting_kept(model, outside), trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs)

    try:
        memory = plan_memory(model.train(), step, mode=mode)
    finally:
        model.train(training)
    if memory is None:
        logger.info("memory is not planned: %s", "memory='naive'" if mode == "naive" else loader.description())
        return None
    plan = memory.step.plan
    logger.info(
        "memory (%s): %d tensors of lsq's layers in %.1f MiB, %.2f%% above the lower bound; outside of it %s",
        mode, len(plan.offsets), memory.arena.size / 2**20, 100 * plan.gap, described(outside),
    )  # fmt: skip
    return memory


@contextmanager
def counting_kept(model: nn.Module, found: Counter) -> Iterator[None]:
    """Add to `found` the bytes that others' code keeps for the backward pass: class of the innermost module -> bytes.

    For a rehearsed step, in which lsq's layers keep nothing. Every storage counts once, parameters do not.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    inside: list[str] = []
    held = []  # else a storage that is freed could lend its address to the next

    def enter(module: nn.Module, inputs: tuple) -> None:
        inside.append(type(module).__name__)

    def leave(module: nn.Module, inputs: tuple, outputs: object) -> None:
        inside.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            held.append(tensor)
            whole = tensor.numel() * tensor.element_size()  # what a rehearsal makes has one value in memory
            found[inside[-1] if inside else "the loss"] += max(storage.nbytes(), whole)
        return tensor

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def described(outside: Mapping[str, int]) -> str:
    """In words."""
    if not outside:
        return "nothing is kept"
    parts = [f"{name} {size / 2**20:.1f}" for name, size in Counter(outside).most_common(MOST)]
    others = f", {len(outside) - MOST} others" if len(outside) > MOST else ""
    total = sum(outside.values()) / 2**20
    return f"{total:.1f} MiB are kept by modules that are not lsq's ({', '.join(parts)}{others})"
