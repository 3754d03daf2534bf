"""Clips that all processes of a training share, as they share gradients.

Each process measures clips on its own batches. Before an optimizer steps, clips that follow
activations become the largest of all processes, and measurements of learned clips are averaged.
Processes may run different passes, but make the same steps. So the number of a step alone decides
whether clips are exchanged, and every process takes part, whatever it has measured.
"""

import functools
import logging
import sys
import weakref

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lsq.config import require_model
from lsq.dist import roll_call
from lsq.run import parameter_state
from lsq.run.parameter_state import steps
from lsq.run.shards import is_shard, local

logger = logging.getLogger(__name__)

EVERY_STEP, PERIOD = 64, 16
"""The first EVERY_STEP steps of an optimizer average measured clips; later, when little is
measured, every PERIOD-th step does."""


def share(model: nn.Module, group: ProcessGroup | None = None) -> RemovableHandle:
    """Average the clips of `model` over the processes of a group that train it in a way that lsq
    does not see. `group`: None: all processes; if DistributedDataParallel wraps the model, its own
    group counts. Return a handle, whose `remove()` ends the averaging."""
    require_model(model)
    handle = RemovableHandle(steps.shared)
    steps.shared[handle.id] = weakref.ref(model), group
    return handle


def agree(optimizer: Optimizer) -> None:
    """Make measured clips the same in all processes, before a step of `optimizer`."""
    trained = steps.trained.get(optimizer)
    if trained is None or trained.known != _known(optimizer):
        trained = steps.trained[optimizer] = _Trained(optimizer, trained)
    if not (trained.models or trained.meshes) or trained.alone():
        return
    trained.steps += 1
    due = trained.steps <= EVERY_STEP or trained.steps % PERIOD == 0
    try:
        for model, _, group in trained.models:
            if model() is not None:
                take_largest(model(), group)
            if model() is not None and due:
                average_learned(model(), group)
        for mesh in trained.meshes if due else ():
            _average_shards(mesh)
    except RuntimeError as error:
        roll_call.raise_named(error)


def _known(optimizer: Optimizer) -> tuple:
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    return sizes, steps.wraps, tuple(steps.shared)


class _Trained:
    """Models and meshes that an optimizer trains in several processes."""

    def __init__(self, optimizer: Optimizer, before: "_Trained | None"):
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        ids = set(map(id, parameters))
        self.known = _known(optimizer)
        self.steps = 0 if before is None else before.steps
        found = [
            (model, wrapper, wrapper().process_group)
            for model, wrapper in steps.wrapped.items()
            if wrapper()
        ]
        inside = {id(part) for model, _, _ in found for part in model.modules()}
        shared = [
            (model(), None, group) for model, group in steps.shared.values() if model() is not None
        ]
        shared = [one for one in shared if id(one[0]) not in inside]
        trains = {
            id(model): not ids.isdisjoint(map(id, model.parameters()))
            for model, *_ in (*found, *shared)
        }
        if "deepspeed" in sys.modules and not any(trains[id(one[0])] for one in shared):
            trains |= {id(one[0]): True for one in shared}  # ZeRO's optimizer holds copies alone
        self.models = [
            (weakref.ref(model), wrapper, group)
            for model, wrapper, group in (*found, *shared)
            if trains[id(model)]
        ]
        self.meshes = list(dict.fromkeys(one.device_mesh for one in parameters if is_shard(one)))

    def alone(self) -> bool:
        """Return whether processes may step at different times, so that none can wait for
        another."""
        wrappers = [wrapper() for _, wrapper, _ in self.models if wrapper is not None]
        if any(one is not None and one._join_config.enable for one in wrappers):
            _warn(
                "under DistributedDataParallel.join() the clips that each process measures are not"
                " averaged: processes may step without the others. At its end all get those of the"
                " process that has joined last"
            )
            return True
        if torch._C._current_graph_task_id() != -1:
            _warn(
                "an optimizer steps within the backward pass, where the clips that each process"
                " measures cannot be averaged: step after it"
            )
            return True
        return False


_warn = functools.cache(logger.warning)  # each message once


def modules_in(model: nn.Module) -> list[nn.Module]:
    known = set(steps.modules())
    found = [module for module in model.modules() if module in known]
    return [one for one in found if one.first_parameter().numel()]  # DeepSpeed's ZeRO 3 empties it


@torch.no_grad()
def take_largest(model: nn.Module, group: ProcessGroup | None) -> None:
    """Set clips of activations that do not learn to the largest of all processes."""
    clips: dict[int, tuple[Tensor, bool]] = {}
    for module in modules_in(model):
        if module.quant.quantized and not module.quant.learned:
            module.follow_clips()
            known = module.calibrated
            clips |= {
                id(one): (one, known)
                for one in module.activation_clips().values()
                if not is_shard(one)
            }
    if not clips:
        return
    values = [clip.data for clip, _ in clips.values()]
    own = torch.cat(values)
    known = torch.tensor([known for _, known in clips.values()], dtype=own.dtype)
    largest = own * known.to(own.device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
    torch._foreach_copy_(values, list(torch.where(largest > 0, largest, own).split(1)))


@torch.no_grad()
def average_learned(model: nn.Module, group: ProcessGroup | None) -> None:
    """Set each learned clip to its mean over the processes that have measured it since the last
    time, or if none has, over all: a process that has not run a layer has not limited its steps."""
    modules = [module for module in modules_in(model) if module.quant.learned]
    clips: dict[int, tuple[Tensor, bool]] = {}
    for module in modules:
        module.limit_clip_steps()
        news = module.measured.take_news()
        for name, clip in module.clips().items():
            if not is_shard(clip):
                clips[id(clip)] = clip, name in news or clips.get(id(clip), (clip, False))[1]
    if not clips:
        return
    parameters = [clip for clip, _ in clips.values()]
    own = torch.cat([clip.detach().float().flatten() for clip in parameters])
    means, _ = _means(own, [measured for _, measured in clips.values()], parameters, [group])
    values = means.split([clip.numel() for clip in parameters])
    torch._foreach_copy_(
        parameters, [one.view_as(clip) for one, clip in zip(values, parameters, strict=True)]
    )
    for module in modules:
        parameter_state.remember(module.clips().values(), module.quant.clip_step)


@torch.no_grad()
def _average_shards(mesh) -> None:
    """Average clips that are shards on a mesh; the means are written to the shards later."""
    named = [
        (module, name, clip)
        for module in steps.modules()
        for name, clip in module.clips().items()
        if is_shard(clip) and clip.device_mesh == mesh
    ]
    if not named:
        return
    of_modules = {module: module.measured.take_news() for module in {one[0] for one in named}}
    news = [of_modules[module].get(name) for module, name, _ in named]
    clips = [clip for _, _, clip in named]
    device = local(clips[0]).device
    values = (
        torch.zeros(clip.numel(), device=device) if value is None else value
        for clip, value in zip(clips, news, strict=True)
    )
    own = torch.cat([value.to(device).float().flatten() for value in values])
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    means, counts = _means(own, [value is not None for value in news], clips, groups)
    sizes = [clip.numel() for clip in clips]
    for (module, name, clip), value, found in zip(
        named, means.split(sizes), counts.split(sizes), strict=True
    ):
        if found[0] > 0:
            module.measured.replace(name, clip, value.view(clip.shape))


def _means(
    own: Tensor, measured: list[bool], clips: list[Tensor], groups: list[ProcessGroup | None]
) -> tuple[Tensor, Tensor]:
    """Return (means, counts) float32 [n] over the processes that have measured, or over all if none
    has. `own`: values of this process. Sums are taken over `groups` one after another."""
    counts = torch.tensor(measured, dtype=torch.float32, device=own.device)
    counts = counts.repeat_interleave(
        torch.tensor([clip.numel() for clip in clips], device=own.device), output_size=len(own)
    )
    joined = torch.stack([torch.where(counts > 0, own, 0.0), counts, own, torch.ones_like(own)])
    for group in groups:
        distributed.all_reduce(joined, group=group)
    of_measured, counts, of_all, processes = joined
    return torch.where(counts > 0, of_measured / counts.clamp(min=1.0), of_all / processes), counts
