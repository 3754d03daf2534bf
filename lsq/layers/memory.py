"""Planned memory of a model's training step: rehearse the step, then place its tensors."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from lsq.config import require_model
from lsq.layers.module import ProgramModule
from lsq.native import loader
from lsq.run.guard import MARGIN, GuardedMemory
from lsq.run.planned import StepMemory
from lsq.run.step import Rehearsal, StepPlan, counting_kept, node_names, plan_step, rehearse

MODES = ("planned", "guard", "naive")


def rehearse_step(
    model: nn.Module, step: Callable[[], torch.Tensor]
) -> tuple[Rehearsal, tuple[str, ...]]:
    """Return the passes of `step`, and for each pass its module's path in `model`.

    Raises ValueError if the model has no layer of lsq, uses gradient checkpointing or is in eval
    mode; if the step trains modules outside the model; and as `lsq.run.step.rehearse` does.
    """
    require_model(model)
    modules = list(model.modules())
    if not any(isinstance(module, ProgramModule) for module in modules):
        raise ValueError(
            f"no layer of this {type(model).__name__} is lsq's; call lsq.convert(model), and plan"
            " that"
        )
    # transformers' name for it
    if any(getattr(module, "gradient_checkpointing", False) for module in modules):
        raise ValueError(
            "gradient checkpointing runs layers again in the backward pass, which cannot be"
            " planned; call model.gradient_checkpointing_disable(), or train without a plan"
            " (LsqCallback without largest_batch)"
        )
    rehearsed = rehearse(step, model.parameters())
    names = {module: name for name, module in model.named_modules()}
    outside = sorted({type(owner).__name__ for owner in rehearsed.owners if owner not in names})
    if outside:
        raise ValueError(
            f"the step also trains {', '.join(outside)} outside the model; put all modules into"
            " one, and plan that"
        )
    if not any(owner.training for owner in rehearsed.owners):
        raise ValueError(
            f"this {type(model).__name__} is in eval mode, in which nothing is planned; call"
            " model.train() first"
        )
    return rehearsed, node_names(rehearsed.owners, names)


def describe_memory(model: nn.Module, step: Callable[[], torch.Tensor]) -> StepPlan:
    """Return the plan of a step, without allocating memory; see `plan_memory`."""
    rehearsed, names = rehearse_step(model, step)
    return plan_step(tuple(rehearsed.passes), names, margin=0)


def plan_memory(
    model: nn.Module, step: Callable[[], torch.Tensor], *, mode: str = "planned"
) -> StepMemory | None:
    """Give the tensors inside the layers of `model` fixed places in one arena.

    Args:
        model: with layers of lsq.
        step: runs the model on the largest batch and returns the loss, a scalar. It is
            rehearsed: the layers compute nothing. Every training step must run the same layers
            in the same order, on batches no larger; eval mode is free.
        mode: "planned"; "guard" checks every access and is slow; "naive" takes any plan away.

    Returns:
        The memory, until `release_memory` frees it; None under "naive" or without C++.

    Raises:
        ValueError: an unknown mode, or a step that cannot be planned (see `rehearse_step`).
        MemoryError: the system cannot give that much memory.
    """
    if mode not in MODES:
        raise ValueError(f"memory is {mode!r}; allowed: {', '.join(map(repr, MODES))}")
    release_memory(model)
    if mode == "naive" or not loader.available():
        return None
    outside: Counter[str] = Counter()

    def counted() -> torch.Tensor:
        with counting_kept(model, outside):
            return step()

    rehearsed, names = rehearse_step(model, counted)
    margin = MARGIN if mode == "guard" else 0
    kind = GuardedMemory if mode == "guard" else StepMemory
    device = rehearsed.owners[0].target.device
    plan = plan_step(tuple(rehearsed.passes), names, margin=margin)
    memory = kind(plan, rehearsed.owners, names, device, outside=outside)
    for owner in rehearsed.owners:
        owner.step_memory = memory
    return memory


def release_memory(model: nn.Module) -> None:
    """Free the planned memory; gradients in it move to memory of their own."""
    require_model(model)
    for module in model.modules():
        if isinstance(module, ProgramModule) and module.step_memory is not None:
            module.step_memory.copy_out()
            module.step_memory = None
